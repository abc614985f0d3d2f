"""What the attendant reads while a call runs is done before the next call begins."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stoker.manager.protocol import wire
from stoker.manager.protocol.calls import CallEnd, CallOptions, CallSpec
from stoker.manager.protocol.to_agent import GivenBack, RunsEnded
from stoker.manager.protocol.to_library import GiveBack, Run, Stop
from stoker.manager.protocol.to_pilot import FunctionBlob
from stoker.pilot.library import frames
from stoker.pilot.library.runner import NO_CALL
from stoker.pilot.library.server import LibraryServer
from stoker.pilot.library.soundness import Soundness

LONG, NEXT, LAST = 1, 2, 3
CALL_S = 0.3
LIMIT_S = 20.0


class TimedRunner:
    """A slot whose calls take their time and give nothing."""

    def __init__(self) -> None:
        self.call: Any = NO_CALL
        self.begun = 0
        self.evict = False
        self.ended_at = 0.0
        self.ran: list[int] = []
        self.runs = threading.Event()

    def run(self, work: Any) -> CallEnd:
        self.call = work.spec.call
        self.ran.append(work.spec.call)
        self.runs.set()
        time.sleep(CALL_S)
        self.call, self.ended_at = NO_CALL, time.perf_counter()
        return CallEnd(work.spec.call, ok=True, payload=b"")


class Served:
    """A library's server in a thread, and the other end of its socket."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(LIMIT_S)
        self.runner = TimedRunner()
        self.server = LibraryServer(theirs, library=1, context=None, calls_allowed=0, soundness=Soundness())
        self._thread = threading.Thread(target=self.server.serve, args=(self.runner,), kwargs={"idle": lambda: None})
        self._thread.start()

    def say(self, *messages: Any) -> None:
        self.sock.sendall(frames.pack(list(messages)))

    def said(self) -> list[Any]:
        """All that the server says until it ends."""
        self.say(Stop())
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.sock.setblocking(False)
        reader, decode, messages = frames.FrameReader(self.sock), wire.to_agent_decoder(), []
        while True:
            try:
                reader.fill(block=False)
            except BlockingIOError:
                return messages
            while (frame := reader.next()) is not None:
                messages += decode(frame).messages


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.sock.close()


def order(*calls: int) -> Run:
    blob = FunctionBlob("f", "f", b"x")  # type: ignore[arg-type]
    return Run("f", [CallSpec(call, b"") for call in calls], CallOptions(), blob)  # type: ignore[arg-type]


def test_a_call_that_the_attendant_has_read_to_give_back_does_not_begin(served: Served) -> None:
    """The attendant is slow at it: the long call ends meanwhile."""
    decode = served.server._decode
    began = threading.Event()

    def slowly(frame: memoryview) -> Any:
        read = decode(frame)
        if isinstance(read.messages[0], GiveBack):
            assert threading.current_thread().name == "stoker-attendant"
            assert served.runner.call == LONG
            began.set()
            time.sleep(2 * CALL_S)
        return read

    served.server._decode = slowly  # type: ignore[assignment]
    served.say(order(LONG, NEXT, LAST))
    assert served.runner.runs.wait(LIMIT_S)
    served.say(GiveBack(count=1, order=7), GiveBack(calls=(NEXT,)))  # type: ignore[arg-type]
    assert began.wait(LIMIT_S)
    time.sleep(2 * CALL_S)
    said = served.said()
    assert served.runner.ran == [LONG]
    assert [end.call for message in said if isinstance(message, RunsEnded) for end in message.ends] == [LONG]
    assert [message for message in said if isinstance(message, GivenBack)] == [
        GivenBack((LAST,), order=7), GivenBack((NEXT,)),
    ]  # type: ignore[arg-type]  # fmt: skip

