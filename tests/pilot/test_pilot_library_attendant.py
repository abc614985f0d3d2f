from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from live.peers import until

from stoker.contexts.ambient import StopRequest
from stoker.pilot.core import infrastructure
from stoker.pilot.library import connection
from stoker.pilot.library.process import LibraryFault, ProcessGuard
from stoker.pilot.library.runner import NO_CALL
from stoker.pilot.library.server import LibraryServer
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec
from stoker.protocol.to_agent import GivenBack, Resized, RunEvicted, RunsEnded
from stoker.protocol.to_library import Evict, GiveBack, Resize, Run, Stop
from stoker.protocol.to_pilot import FunctionBlob

LONG, NEXT, LAST = 1, 2, 3
LIMIT_S = 20.0
ATTENDANT = "stoker-attendant"


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class LeftError(Exception):
    """Raised instead of the exit of the library process, to end threads of the server."""


class GatedRunner:
    """A slot whose calls start and end on request. `ended_at`: time when the function ended, before its result is
    packed.
    """

    def __init__(self) -> None:
        self.call: Any = NO_CALL
        self.taken_call: Any = NO_CALL
        self.begun_calls = 0
        self.stop = StopRequest()
        self.ended_at = 0.0
        self.ran: list[int] = []
        self.may_begin, self.may_end = threading.Event(), threading.Event()
        self.may_begin.set()
        self.runs = threading.Event()
        self.is_clean = True
        self.cleans, self.may_clean = threading.Event(), threading.Event()
        self.fault: LibraryFault | None = None

    def remove_left_files(self) -> LibraryFault | None:
        self.cleans.set()
        assert self.may_clean.wait(LIMIT_S)
        return self.fault

    def take_call(self, call: int) -> None:
        self.stop = StopRequest()
        self.taken_call = call

    def run(self, work: Any) -> CallEnd | CallProgress:
        assert self.may_begin.wait(LIMIT_S)
        self.call = call = work.spec.call
        self.ended_at = time.perf_counter()
        self.ran.append(call)
        self.runs.set()
        assert self.may_end.wait(LIMIT_S)
        self.call = NO_CALL
        return CallProgress(call) if self.stop.is_requested else CallEnd(call, ok=True, payload=b"")

    def mark_idle(self) -> None:
        pass


class Resizable:
    """A context that reduces its memory on request after a short delay."""

    def __init__(self) -> None:
        self.runners: list[GatedRunner] = []
        self.seen: list[list[int]] = []

    def resize(self, *, device_memory_bytes: int) -> None:
        for runner in self.runners:
            runner.may_end.set()
        time.sleep(0.1)
        self.seen.append([each.call for each in self.runners])


class Served:
    """The server of a library in a thread, and the other side of the socket."""

    def __init__(self, slots: int = 1) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(LIMIT_S)
        self.context = Resizable()
        self.runners = self.context.runners = [GatedRunner() for _ in range(slots)]
        self.server = LibraryServer(theirs, library=1, context=self.context, calls_allowed=0, guard=ProcessGuard())
        self.server._exit = self._exit  # type: ignore[method-assign]
        self.exits: list[int] = []

        self._reader, self._decode = connection.FrameReader(self.sock), wire.to_agent_decoder()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _exit(self, code: int) -> NoReturn:
        """Record the exit code. Threads of the server may call this method after the end of the test."""
        self.exits.append(code)
        raise LeftError

    def start(self) -> Served:
        self._thread.start()
        return self

    def _serve(self) -> None:
        if len(self.runners) == 1:
            self.server.serve(self.runners[0], on_idle=lambda: None)  # type: ignore[arg-type]
        else:
            self.server.serve_threads(self.runners.__getitem__, len(self.runners), on_idle=lambda slot: None)  # type: ignore[arg-type]

    def say(self, *messages: Any) -> None:
        self.sock.sendall(connection.pack_frame(list(messages)))

    def hear(self, kind: type, count: int = 1) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            assert self._reader.receive_bytes(block=True)
            while (frame := self._reader.next_frame()) is not None:
                found += [message for message in self._decode(frame).messages if isinstance(message, kind)]
        return found

    def end(self) -> list[Any]:
        """Let all calls and the server end; return all unread messages."""
        for runner in self.runners:
            runner.may_begin.set()
            runner.may_end.set()
        self.say(Stop())
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.sock.setblocking(False)
        messages: list[Any] = []
        while True:
            try:
                self._reader.receive_bytes(block=False)
            except BlockingIOError:
                return messages
            while (frame := self._reader.next_frame()) is not None:
                messages += self._decode(frame).messages


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.sock.close()


def order(*calls: int) -> Run:
    blob = FunctionBlob("f", "f", b"x")  # type: ignore[arg-type]
    return Run("f", [CallSpec(call, b"") for call in calls], CallOptions(), blob)  # type: ignore[arg-type]


def test_call_returned_by_the_attendant_does_not_start(served: Served) -> None:
    """The attendant returns the call late, while the slot packs the result of the previous call."""
    decode, (runner,) = served.server._decode, served.runners
    read = threading.Event()

    def slowly(frame: memoryview) -> Any:
        found = decode(frame)
        if isinstance(found.messages[0], GiveBack):
            assert (threading.current_thread().name, runner.call) == (ATTENDANT, LONG)
            read.set()
            runner.may_end.set()
            time.sleep(0.2)
        return found

    served.server._decode = slowly  # type: ignore[assignment]
    served.start().say(order(LONG, NEXT, LAST))
    assert runner.runs.wait(LIMIT_S)
    served.say(GiveBack(count=1, order=7), GiveBack(calls=(NEXT,)))  # type: ignore[arg-type]
    assert read.wait(LIMIT_S)
    until(lambda: served.server._served == 1)
    said = served.end()
    assert runner.ran == [LONG]
    assert [end.call for message in said if isinstance(message, RunsEnded) for end in message.ends] == [LONG]
    assert [message for message in said if isinstance(message, GivenBack)] == [
        GivenBack((LAST,), order=7), GivenBack((NEXT,)),
    ]  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("message", [Evict(NEXT), Resize(5)], ids=["evict", "resize"])  # type: ignore[arg-type]
def test_late_messages_of_the_attendant_find_the_call_started(served: Served, message: Any) -> None:
    """The attendant sees a call run and waits for a full socket, until the next call is taken but not started."""
    (runner,) = served.runners
    send = served.server.outbox.send_unsent
    held_up, goes_on = threading.Event(), threading.Event()

    def slow_send() -> None:
        if threading.current_thread().name == ATTENDANT and not held_up.is_set():
            held_up.set()
            assert goes_on.wait(LIMIT_S)
        send()

    served.server.outbox.send_unsent = slow_send  # type: ignore[method-assign]
    served.start().say(order(LONG, NEXT))
    assert held_up.wait(LIMIT_S)
    runner.may_begin.clear()
    runner.may_end.set()
    until(lambda: runner.taken_call == NEXT)
    runner.may_end.clear()
    served.say(message)
    goes_on.set()
    if isinstance(message, Evict):
        until(lambda: runner.stop.is_requested)
        said = served.end()
        assert [each.progress.call for each in said if isinstance(each, RunEvicted)] == [NEXT]
    else:
        until(lambda: served.server._resizes)
        runner.may_begin.set()
        runner.may_end.set()
        assert served.hear(Resized) == [Resized(5)]
        served.end()
        assert served.context.seen == [[NO_CALL]]


def test_end_of_a_call_is_sent_before_its_files_are_cleared(served: Served) -> None:
    (runner,) = served.runners
    runner.is_clean = False
    served.start().say(order(LONG))
    runner.may_end.set()
    assert runner.cleans.wait(LIMIT_S)
    (ended,) = served.hear(RunsEnded)
    assert [end.call for end in ended.ends] == [LONG]
    runner.may_clean.set()
    served.end()


def test_library_with_uncleared_files_ends_after_calls_in_other_slots() -> None:
    two_slots = Served(slots=2)
    for each in two_slots.runners:
        each.is_clean, each.fault = False, LibraryFault(infrastructure.CLEANUP_FAILED, "the disk is gone")
        each.may_clean.set()
    two_slots.start().say(order(LONG, NEXT))
    first, second = two_slots.runners
    for each in (first, second):
        assert each.runs.wait(LIMIT_S)
    first.may_end.set()
    until(lambda: two_slots.server._fault is not None)
    two_slots.say(order(LAST))
    until(lambda: len(two_slots.server._queue) == 1)
    assert not two_slots.exits
    second.may_end.set()
    until(lambda: two_slots.exits)
    assert two_slots.exits[0] == infrastructure.CLEANUP_FAILED
    assert sorted(first.ran + second.ran) == [LONG, NEXT]
    ends = [end.call for message in two_slots.hear(RunsEnded, 2) for end in message.ends]
    assert sorted(ends) == [LONG, NEXT]
    two_slots.sock.close()
    two_slots._thread.join(LIMIT_S)
