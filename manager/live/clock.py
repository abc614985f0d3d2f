"""The manager's clock, the core's timers, and unsent acknowledgements."""

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
from stoker.decoding import read_json
from stoker.protocol import to_client, to_pilot
from stoker.whole_files import write_whole

CLIENT_ACK_S = 0.25
PILOT_ACK_S = 4.0

Ack = to_pilot.Ack | to_client.Ack


class _StoredOffset(msgspec.Struct, frozen=True):
    """`ahead_s`: Unix time minus the time of the monotonic clock whose id is `monotonic`."""

    monotonic: str
    ahead_s: float


class Clock:
    """Seconds since the epoch that advance with the monotonic clock, so that a changed wall clock makes no pilot look
    silent.

    Args:
        not_before: Earliest time to return.
        file: Keeps the offset for the next manager on this machine.
    """

    def __init__(self, *, not_before: float = 0.0, file: Path | None = None) -> None:
        kept = read_json(file, _StoredOffset) if file is not None else None
        ahead_s = kept.ahead_s if kept is not None and kept.monotonic == _monotonic_clock_id() else -math.inf
        if ahead_s + time.monotonic() < not_before:
            ahead_s = max(time.time(), not_before) - time.monotonic()
        self._ahead_s = ahead_s
        if file is not None:
            with contextlib.suppress(OSError):  # if the disk is full, the next manager starts from the wall clock
                write_whole(file, msgspec.json.encode(_StoredOffset(_monotonic_clock_id(), ahead_s)))

    def now(self) -> float:
        """Return seconds since the epoch."""
        return self._ahead_s + time.monotonic()


def _monotonic_clock_id() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # an old kernel has no time namespaces
        namespace = ""
    return f"{locks.machine_id()} {namespace}"


class TimerHeap:
    """Timers by due time. If a timer is set again, its old entry is ignored."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def set_timer(self, key: str, *, at: float) -> None:
        heapq.heappush(self._heap, (at, key))

    def next_due_at(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def pop_due_timers(self, now: float, *, current: Mapping[str, float]) -> Iterator[str]:
        """Remove the due timers, and yield their keys. `current`: each timer's valid due time."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, key = heapq.heappop(heap)
            if current.get(key) == at:
                yield key


class PendingAcks:
    """The last unsent acknowledgement of each peer. It is sent with the next frame to the peer, or alone after
    `longest_s / 2` to `longest_s` seconds."""

    def __init__(self, longest_s: float) -> None:
        self.due_at = math.inf
        self._half_s = longest_s / 2
        self._older: dict[str, Ack] = {}
        self._newer: dict[str, Ack] = {}

    def add(self, peer: str, ack: Ack, now: float) -> None:
        if peer in self._older:
            self._older[peer] = ack
            return
        if self.due_at == math.inf:
            self.due_at = now + self._half_s
        self._newer[peer] = ack

    def take_ack_for_frame(self, peer: str) -> tuple[Ack, ...]:
        ack = self._newer.pop(peer, None) or self._older.pop(peer, None)
        return () if ack is None else (ack,)

    def take_overdue_acks(self, now: float) -> list[tuple[str, Ack]]:
        if now < self.due_at:
            return []
        out, self._older, self._newer = list(self._older.items()), self._newer, {}
        self.due_at = now + self._half_s if self._older else math.inf
        return out
