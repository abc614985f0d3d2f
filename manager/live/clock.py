"""The manager's clock: seconds since the epoch when the session started, and from then on what really passes.

Times in the journal and in stories are to mean the same after a restart, so they count from the epoch. But a wall clock
is set forward and back while a session lasts, and an hour that nobody lived through must not make every pilot silent
for an hour, stop every timer for one, nor drop every call that waits with a deadline. So the wall clock is read once.

A manager that is started again goes on with the clock of the one before: a small file says how far that clock was ahead
of the kernel's monotonic one. On another machine, or after a boot, the manager reads the wall clock again.

The timers that the core has set, by the time at which they fire.

Delays acknowledgements: they only free memory at the peer, so they need not leave at once.

An acknowledgement leaves with the next frame to its peer, or alone after a delay. Alone it wakes the peer for nothing,
so the delay is long for pilots, of which there may be thousands. A program that ends waits for its last
acknowledgement, so the delay is short for clients. A pilot that has left waits too, and its last one is not delayed.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from stoker import locks
from stoker.decoding import UNREADABLE
from stoker.protocol import to_client, to_pilot

# ---- clock


class _Kept(msgspec.Struct, frozen=True):
    """What a manager leaves to the next one. `monotonic` names the monotonic clock that `ahead_s` counts from."""

    monotonic: str
    ahead_s: float


class Clock:
    """`not_before`: the last time that the journal knows; a clock never starts before it. `file`: where the clock is
    kept for the next manager."""

    def __init__(self, *, not_before: float = 0.0, file: Path | None = None) -> None:
        ahead_s = _read(file) if file is not None else None
        if ahead_s is None or ahead_s + time.monotonic() < not_before:
            ahead_s = max(time.time(), not_before) - time.monotonic()
        self._ahead_s = ahead_s
        if file is not None:
            _write(file, _Kept(_monotonic(), ahead_s))

    def now(self) -> float:
        """Seconds since the epoch; never goes back."""
        return self._ahead_s + time.monotonic()


def _monotonic() -> str:
    """Processes that read the same here have the same monotonic clock."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # an old kernel, which has one for all
        namespace = ""
    return f"{locks.machine()} {namespace}"


def _read(file: Path) -> float | None:
    """How far the clock of the manager before was ahead; None where that says nothing here."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except (OSError, *UNREADABLE):
        return None
    return kept.ahead_s if kept.monotonic == _monotonic() else None


def _write(file: Path, kept: _Kept) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next manager reads the wall clock
        file.write_bytes(msgspec.json.encode(kept))
        file.chmod(0o600)


# ---- timers


class TimerHeap:
    """A heap of timers. A timer that was set anew leaves its old entry in the heap; the core knows which one holds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, *, at: float) -> None:
        """Have a timer fire at this time."""
        heapq.heappush(self._heap, (at, key))

    def due_at(self) -> float:
        """When the next one may fire; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float, *, current: Mapping[str, float]) -> Iterator[str]:
        """Remove and return the timers that fire now. `current`: when each timer of the core is to fire."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, key = heapq.heappop(heap)
            if current.get(key) == at:
                yield key


# ---- acks


CLIENT_ACK_S = 0.25
PILOT_ACK_S = 4.0

Ack = to_pilot.Ack | to_client.Ack


class Acks:
    """The last unsent acknowledgement of each peer. Each leaves between half of `longest_s` and `longest_s` later."""

    def __init__(self, longest_s: float) -> None:
        self.due_at = math.inf
        """When `overdue` is to be called next."""
        self._half_s = longest_s / 2
        self._older: dict[str, Ack] = {}
        self._newer: dict[str, Ack] = {}

    def add(self, peer: str, ack: Ack, now: float) -> None:
        """Delay an acknowledgement. It replaces an earlier one, which it includes."""
        if peer in self._older:
            self._older[peer] = ack
            return
        if self.due_at == math.inf:
            self.due_at = now + self._half_s
        self._newer[peer] = ack

    def along(self, peer: str) -> tuple[Ack, ...]:
        """Remove and return the acknowledgement to send with a frame to this peer."""
        ack = self._newer.pop(peer, None) or self._older.pop(peer, None)
        return () if ack is None else (ack,)

    def overdue(self, now: float) -> list[tuple[str, Ack]]:
        """Remove and return those that have to leave alone now."""
        if now < self.due_at:
            return []
        out, self._older, self._newer = list(self._older.items()), self._newer, {}
        self.due_at = now + self._half_s if self._older else math.inf
        return out
