"""What is to happen, in order of time: the simulator's only clock.

Times are seconds, rounded to a microsecond when they are noted. So a last bit that another machine's mathematics would
compute otherwise does not change the order of two events; what falls on the same microsecond happens in the order in
which it was noted.

An entry is a plain list, because millions of them are made, compared and thrown away: lists are compared in C, by time
and then by number, and never further.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

_Act = Callable[..., None]
Entry = list[Any]
"""One thing that is to happen: its time, its number, what to call (None: nothing any more), and with what."""


def cancel(entry: Entry) -> None:
    """It is not to happen. What has happened already stays so."""
    entry[2] = None
    entry[3] = ()


class Agenda:
    """A heap of entries. `now` is the time of the one that is happening."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Entry] = []
        self._noted = 0
        self._halted = False

    def after(self, delay_s: float, act: _Act, *args: Any) -> Entry:
        """Have something happen so many seconds from now. Raises ValueError for what cannot be waited for."""
        return self._note(self.now + delay_s, act, args)

    def at(self, when: float, act: _Act, *args: Any) -> Entry:
        """Have something happen at a time. Raises ValueError for one that is past, or is none."""
        return self._note(when, act, args)

    def _note(self, when: float, act: _Act, args: tuple[Any, ...]) -> Entry:
        now = self.now
        if not now <= when < math.inf:
            raise ValueError(f"nothing can happen at {when} s: it is {now} s")
        when = int(when * 1e6 + 0.5) / 1e6
        self._noted += 1
        entry = [when if when > now else now, self._noted, act, args]
        heapq.heappush(self._heap, entry)
        return entry

    def step(self) -> bool:
        """Let the next thing happen. False when nothing is to happen any more."""
        return self.steps(1) == 1

    def steps(self, most: int, *, until_s: float = math.inf) -> int:
        """Let things happen: so many at most, none after a time, and none once `halt` was called meanwhile. Returns how
        many."""
        heap, pop = self._heap, heapq.heappop
        self._halted = False
        for count in range(most):
            act = None
            while act is None:
                if self._halted or not heap or heap[0][0] > until_s:
                    return count
                at, _, act, args = pop(heap)
            self.now = at
            act(*args)
        return most

    def halt(self) -> None:
        """What happens now is the last of these steps."""
        self._halted = True

    @property
    def next_at(self) -> float:
        """When the next thing happens; infinite when nothing does."""
        heap = self._heap
        while heap and heap[0][2] is None:
            heapq.heappop(heap)
        return float(heap[0][0]) if heap else math.inf
