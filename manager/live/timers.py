"""The timers that the core has set, by the time at which they fire."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping


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
