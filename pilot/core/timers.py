"""The times at which a pilot's core wants to be told that they have come."""

from __future__ import annotations

import heapq


class Timers:
    """Timers by their keys: a later one of the same key replaces the earlier."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, str]] = []

    def set(self, at: float, key: str) -> None:
        """Have a timer fire at this time."""
        self._timers = [(due, other) for due, other in self._timers if other != key]
        heapq.heapify(self._timers)
        heapq.heappush(self._timers, (at, key))

    def due(self, now: float) -> list[str]:
        """The keys of timers whose time has come; each once."""
        keys = []
        while self._timers and self._timers[0][0] <= now:
            keys.append(heapq.heappop(self._timers)[1])
        return keys

    @property
    def next_at(self) -> float:
        """When the next timer is due; infinite when there is none."""
        return self._timers[0][0] if self._timers else float("inf")
