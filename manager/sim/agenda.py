"""What is to happen, in order of time: the simulator's only clock.

Times are seconds, rounded to a microsecond when they are noted. So a last bit that another machine's mathematics would
compute otherwise does not change the order of two events; what falls on the same microsecond happens in the order in
which it was noted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

_Act = Callable[..., None]


class Entry:
    """One thing that is to happen; `cancel` makes it nothing."""

    __slots__ = ("act", "args", "at")

    def __init__(self, at: float, act: _Act | None, args: tuple[Any, ...]) -> None:
        self.at = at
        self.act = act
        self.args = args

    def cancel(self) -> None:
        """It is not to happen. What has happened already stays so."""
        self.act = None
        self.args = ()


class Agenda:
    """A heap of entries. `now` is the time of the one that is happening."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Entry]] = []
        self._noted = 0

    def after(self, delay_s: float, act: _Act, *args: Any) -> Entry:
        """Have something happen so many seconds from now. Raises ValueError for what cannot be waited for."""
        return self.at(self.now + delay_s, act, *args)

    def at(self, when: float, act: _Act, *args: Any) -> Entry:
        """Have something happen at a time. Raises ValueError for one that is past, or is none."""
        if not self.now <= when < math.inf:
            raise ValueError(f"nothing can happen at {when} s: it is {self.now} s")
        entry = Entry(max(self.now, round(when, 6)), act, args)
        self._noted += 1
        heapq.heappush(self._heap, (entry.at, self._noted, entry))
        return entry

    def step(self) -> bool:
        """Let the next thing happen. False when nothing is to happen any more."""
        heap = self._heap
        while heap:
            at, _, entry = heapq.heappop(heap)
            act = entry.act
            if act is None:
                continue
            self.now = at
            act(*entry.args)
            return True
        return False

    @property
    def next_at(self) -> float:
        """When the next thing happens; infinite when nothing does."""
        heap = self._heap
        while heap and heap[0][2].act is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf
