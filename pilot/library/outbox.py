"""What leaves a library: ends of calls, progress, and answers to its agent.

An end waits for company: short calls share frames. A call's progress waits for the next frame, or leaves alone when the
last frame with progress is long ago. The main thread, the attendant and the threads of slots may all send.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from stoker.pilot.library import frames
from stoker.protocol.calls import CallEnd, CallProgress
from stoker.protocol.to_agent import Reports, RunEvicted, RunsEnded

_REPORT_S = 0.05
"""Progress is reported at most this often."""
_now = time.perf_counter


class LibraryOutbox:
    """The sending side of a library's socket. `lost` is called if the socket is gone, with the calls whose ends could
    not be sent; it does not return."""

    def __init__(self, sock: socket.socket, *, lost: Callable[[OSError, list[int]], NoReturn]) -> None:
        self._sock = sock
        self._lost = lost
        self._sending = threading.Lock()
        self.ends: deque[CallEnd] = deque()
        """Ends that wait."""
        self.oldest_end = 0.0
        """When the first of them came, on `time.perf_counter`."""
        self._reports: dict[int, CallProgress] = {}
        self._reported_at = 0.0

    def report(self, progress: CallProgress) -> None:
        """Note a running call's progress; it goes out with the next frame, or now if the last one is long ago. A
        checkpoint that has not gone out yet goes along with the report that comes after it."""
        self._reports[progress.call] = _with_checkpoint(progress, self._reports.get(progress.call))
        if _now() - self._reported_at > _REPORT_S:
            self.send_waiting()

    def add(self, outcome: CallEnd | CallProgress, *, ended_at: float) -> None:
        """A call has ended, or was evicted with this checkpoint: that is sent now, an end with the next frame."""
        report = self._reports.pop(outcome.call, None)
        if isinstance(outcome, CallProgress):
            self.send([RunEvicted(progress=_with_checkpoint(outcome, report))])
            return
        if report is not None:  # what a call has said last is known before it ends
            self.send([Reports([report])])
        if not self.ends:
            self.oldest_end = ended_at
        self.ends.append(outcome)

    def send_waiting(self) -> None:
        """Send the ends and the progress that wait. When this returns, what another thread was sending is sent too."""
        with self._sending:
            ends, out = self.ends, []
            while ends:
                out.append(ends.popleft())
            messages: list[Any] = [RunsEnded(out)] if out else []
            if self._reports:
                reports, self._reports = self._reports, {}
                messages.append(Reports(list(reports.values())))
                self._reported_at = _now()
            if messages:
                self._send(messages)

    def send(self, messages: list[Any]) -> None:
        """Send these messages now, as one frame."""
        with self._sending:
            self._send(messages)

    def _send(self, messages: list[Any]) -> None:
        data = frames.pack(messages)
        try:
            self._sock.sendall(data)
        except OSError as error:
            self._lost(error, _ended(messages))


def _with_checkpoint(progress: CallProgress, waiting: CallProgress | None) -> CallProgress:
    """A report with the checkpoint of the one that still waits, if it has none of its own."""
    if waiting is None or not waiting.state or progress.state:
        return progress
    return msgspec.structs.replace(progress, state=waiting.state)


def _ended(messages: list[Any]) -> list[int]:
    """The calls that these messages report as ended, or as evicted."""
    found: list[int] = []
    for message in messages:
        if isinstance(message, RunsEnded):
            found += [end.call for end in message.ends]
        elif isinstance(message, RunEvicted):
            found.append(message.progress.call)
    return found
