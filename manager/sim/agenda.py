"""A heap of future events, sorted by time. It is the only clock of the simulator.

Times are rounded to a microsecond, so that floating-point differences between machines do not change the order of
events. Events in the same microsecond run in the order in which they were added.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

_Act = Callable[..., None]
AgendaEntry = list[Any]  # Time, number, function (None = cancelled), arguments; a list, which Python compares fast


def cancel_entry(entry: AgendaEntry | None) -> None:
    """Cancel an entry, unless it has run or is None."""
    if entry is not None:
        entry[2], entry[3] = None, ()


class Agenda:
    """A queue of future function calls. `now`: time of the current entry in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[AgendaEntry] = []
        self._entry_count = 0
        self._is_stopped = False

    def schedule_after(self, delay_s: float, act: _Act, *args: Any) -> AgendaEntry:
        return self.schedule_at(self.now + delay_s, act, *args)

    def schedule_at(self, when: float, act: _Act, *args: Any) -> AgendaEntry:
        """Schedule `act` at time `when`. Raises ValueError if `when` is in the past or not finite."""
        now = self.now
        if not now <= when < math.inf:
            raise ValueError(f"no event can be scheduled at {when} s: the time is {now} s")
        when = int(when * 1e6 + 0.5) / 1e6
        self._entry_count += 1
        entry = [when if when > now else now, self._entry_count, act, args]
        heapq.heappush(self._heap, entry)
        return entry

    def run_entries(self, most: int, *, until_s: float = math.inf) -> int:
        """Run at most `most` entries. Stop earlier at time `until_s` or after a call of `stop_running`. Return the
        number of entries that ran.
        """
        heap, pop = self._heap, heapq.heappop
        self._is_stopped = False
        for count in range(most):
            act = None
            while act is None:
                if self._is_stopped or not heap or heap[0][0] > until_s:
                    return count
                at, _, act, args = pop(heap)
            self.now = at
            act(*args)
        return most

    def stop_running(self) -> None:
        self._is_stopped = True

    @property
    def next_entry_at(self) -> float:
        heap = self._heap
        while heap and heap[0][2] is None:
            heapq.heappop(heap)
        return float(heap[0][0]) if heap else math.inf
