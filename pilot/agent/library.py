"""The agent's handle on one library: its state, its socket, and why it is being ended."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.manager.protocol import wire
from stoker.manager.protocol.calls import Failure
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_agent import ToAgent
from stoker.manager.protocol.to_library import GiveBack
from stoker.manager.protocol.to_pilot import RunCalls, StartLibrary
from stoker.pilot.cache import Pin
from stoker.pilot.core.library import LibraryState
from stoker.pilot.library import frames, marker
from stoker.pilot.zygote.client import Zygote

_decode = wire.to_agent_decoder()


class Library:
    """One library, from its order until its end has been told."""

    def __init__(self, order: StartLibrary, *, folder: Path, log: str) -> None:
        self.order = order
        self.state = LibraryState(order.library, order.recipe, order.devices)
        self.folder = folder
        self.log = log
        self.zygote: Zygote | None = None
        self.pid = 0
        self.pins: list[Pin] = []
        self.arguments: dict[CallId, Pin] = {}
        """Large arguments of calls that it holds, where they had to be brought here."""
        self.waiting: list[RunCalls] = []
        """Orders that wait until it is ready."""
        self.cause: Failure | None = None
        """Why the agent ends it, when that is a failure."""
        self.cache_lacks_bytes = 0
        """What other libraries use in the cache and would have to go, so that its objects fit."""
        self.told_to_end = False
        self.exited: tuple[int, int, int] | None = None
        """Signal, exit code and peak memory, once its process has ended."""
        self.cancelling: dict[int, float] = {}
        """Calls to stop even if they run, and until when they may end by themselves."""
        self.asked_back_at = 0.0
        """Since when it owes an answer to an order to give calls back; 0 = it owes none."""
        self.looks_idle = 0
        """How many looks in a row have found it with calls of which it had begun none, and heard nothing of it."""
        self.resizes = 0
        """Resizes that it was told of and has not answered."""
        self.void_order = 0
        """What it answers to orders up to this one was answered in its place."""
        self._order = 0
        self.ordered_at = time.monotonic()
        self.started_at = 0.0
        self.hello_at = 0.0
        self.fetch_s = 0.0
        self.resident_bytes = 0
        self.device_bytes = 0
        """What it uses of the fullest of its GPUs, measured; 0 = not known."""
        self.last_line = ""
        """What it had printed last when the manager was told while it loaded."""
        self.ready_at = 0.0
        self.is_settled = False
        """Whether its promise of device memory rests on a measurement."""
        self.is_over = False
        """Whether it uses more of a device than could be promised to it."""
        self.closed_at = 0.0
        """When its socket closed, while its process lives on."""
        self.has_limits = False
        self.garbled = ""
        """Why nothing more is read from its socket, once something came there that is no message."""
        self._socket: socket.socket | None = None
        self._reader: frames.FrameReader | None = None
        self._unsent = bytearray()

    # ---- its socket

    def connect(self) -> socket.socket:
        """Make its socket pair; returns the library's end."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.setblocking(False)
        self._socket, self._reader = ours, frames.FrameReader(ours)
        return theirs

    def fileno(self) -> int:
        """For a poller; -1 when it has no socket."""
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def unsent(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._unsent)

    def send(self, messages: list[Any]) -> None:
        """Send messages in one frame, as far as there is room; the rest goes with `push`."""
        self.send_bytes(frames.pack(messages))

    def send_bytes(self, data: bytes | bytearray) -> None:
        """Send a frame."""
        if self._unsent:
            self._unsent += data
            return
        sent = self._try(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]

    def push(self) -> None:
        """Send what waits."""
        sent = self._try(self._unsent)
        del self._unsent[:sent]

    def _try(self, data: bytes | bytearray) -> int:
        if self._socket is None:
            return len(data)
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # it has ended; its end is told elsewhere
            return len(data)

    def receive(self) -> tuple[list[ToAgent], bool]:
        """What it has said, and whether its socket is still open. User code can write anything to that socket: what
        cannot be read makes the library `garbled`, and never raises."""
        out: list[ToAgent] = []
        if self._reader is None or self.garbled:
            return out, False
        try:
            while self._reader.fill(block=False):
                while (frame := self._reader.next()) is not None:
                    out += _decode(frame).messages
        except BlockingIOError:
            return out, True
        except OSError:
            pass
        except Exception as error:
            self.garbled = str(error) or repr(error)
        return out, False

    def hang_up(self) -> None:
        """Close its socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # ---- its calls

    def give_back(self, *, count: int = 0, calls: Iterable[int] = ()) -> GiveBack:
        """An order to give calls back: so many, or these."""
        self._order += 1
        return GiveBack(count=count, calls=tuple(calls), order=self._order)  # type: ignore[arg-type]

    def answer_for_it(self) -> None:
        """The orders that it has been sent are answered in its place: what it says to them later counts no more."""
        self.asked_back_at, self.void_order = 0.0, self._order

    def running(self) -> list[tuple[int, int]]:
        """Calls that it runs, each with its start in nanoseconds of CLOCK_MONOTONIC."""
        return [(call, at) for call, at in marker.running(self.folder / "running") if call in self.state.held]

    def take_back_waiting(self, count: int) -> list[int]:
        """Calls that were not even sent to it, newest first."""
        out: list[int] = []
        while self.waiting and len(out) < count:
            last = self.waiting[-1]
            out.append(last.calls.pop().call)
            if not last.calls:
                self.waiting.pop()
        return out

    def drop_waiting(self, calls: set[int]) -> list[int]:
        """Those of `calls` that were not even sent to it."""
        out: list[int] = []
        for order in self.waiting:
            out += [spec.call for spec in order.calls if spec.call in calls]
            order.calls[:] = [spec for spec in order.calls if spec.call not in calls]
        self.waiting = [order for order in self.waiting if order.calls]
        return out
