"""Waiting calls of one context: by priority, then in order of arrival. Every operation is O(1) amortized.

A level (one priority) has two parts. `fresh` is a deque of calls that have never left it: they arrive in order, so
nothing is sorted. `back` is a heap of those that were sent and came back (taken back, refused, evicted, survivors of a
lost pilot), by arrival: whoever waited first is first again, however many libraries gave calls back at once.

A call that leaves from the middle (cancelled, dropped, sent by a policy) is not searched for: its ticket no longer fits
its entry, which is skipped when its turn comes, or swept when such ghosts outnumber the rest.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.manager.core.state import Call, Group

    _Back = tuple[float, int, int, Call]
    """When it came, its id, its ticket, the call."""

NOT_QUEUED = -1
"""The ticket of a call that has left. Every new call has ticket 0; those that come back get a number."""
_SWEEP_AT = 1000


class _Level:
    __slots__ = ("back", "fresh")

    def __init__(self) -> None:
        self.fresh: deque[Call] = deque()
        self.back: list[_Back] = []


class Queue:
    """See the module's text. `count` is the number of calls that wait here."""

    __slots__ = ("_ghosts", "_levels", "_order", "_tickets", "count")

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._tickets = 0
        self._ghosts = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Call]:
        """Waiting calls, in their order."""
        for priority in reversed(self._order):
            level = self._levels[priority]
            back = (entry[3] for entry in sorted(level.back) if entry[3].ticket == entry[2])
            fresh = (call for call in level.fresh if not call.ticket)
            yield from heapq.merge(back, fresh, key=lambda call: (call.submitted_at, call.id))

    def first(self, limit: int, *, looks: int) -> list[Call]:
        """Up to `limit` calls from the head, in their order. No part of a level is looked at further than `looks`
        entries: where more than that have left from the middle, later calls stand for those behind them. The queue
        stays as it is."""
        found: list[Call] = []
        for priority in reversed(self._order):
            level = self._levels[priority]
            back = (entry[3] for entry in islice(_ascending(level.back), looks) if entry[3].ticket == entry[2])
            fresh = (call for call in islice(level.fresh, looks) if not call.ticket)
            calls = heapq.merge(back, fresh, key=lambda call: (call.submitted_at, call.id))
            found += islice(calls, limit - len(found))
            if len(found) == limit:
                break
        return found

    def push(self, call: Call) -> None:
        """Put a new call at the end of its priority."""
        self.extend([call])

    def extend(self, calls: list[Call]) -> None:
        """Put new calls of one priority at its end."""
        self._level(calls[0].group.options.priority).fresh.extend(calls)
        self.count += len(calls)

    def put_back(self, call: Call) -> None:
        """Put a call that was sent before where its arrival puts it."""
        self._tickets += 1
        call.ticket = self._tickets
        level = self._level(call.group.options.priority)
        heapq.heappush(level.back, (call.submitted_at, call.id, call.ticket, call))
        self.count += 1

    def leave(self, call: Call) -> None:
        """A waiting call leaves from wherever it is."""
        call.ticket = NOT_QUEUED
        self.count -= 1
        self._ghosts += 1
        if self._ghosts > _SWEEP_AT and self._ghosts > self.count:
            self._sweep()

    def head(self) -> Call | None:
        """The call whose turn is next, or None."""
        order = self._order
        while order:
            call = self._first(self._levels[order[-1]])
            if call is not None:
                return call
            del self._levels[order.pop()]
        return None

    def take(self, group: Group, limit: int) -> list[Call]:
        """Take up to `limit` calls of one group from the head of the queue; the head is of that group."""
        level = self._levels[group.options.priority]
        taken: list[Call] = []
        while level.back and len(taken) < limit:
            call = self._first(level)
            if call is None or call.group is not group:
                break
            self._drop_first(level, call)
            taken.append(call)
        if not level.back:
            fresh = level.fresh
            while fresh and len(taken) < limit:
                call = fresh[0]
                if call.ticket:
                    self._ghosts -= 1
                elif call.group is group:
                    taken.append(call)
                else:
                    break
                fresh.popleft()
        for call in taken:
            call.ticket = NOT_QUEUED
        self.count -= len(taken)
        return taken

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            insort(self._order, priority)
        return level

    def _first(self, level: _Level) -> Call | None:
        """The first call of a level; ghosts before it are dropped."""
        fresh, back = level.fresh, level.back
        while fresh and fresh[0].ticket:
            fresh.popleft()
            self._ghosts -= 1
        if not back:
            return fresh[0] if fresh else None
        while back and back[0][3].ticket != back[0][2]:
            heapq.heappop(back)
            self._ghosts -= 1
        if back and fresh:
            call = fresh[0]
            return back[0][3] if back[0][:2] <= (call.submitted_at, call.id) else call
        return back[0][3] if back else (fresh[0] if fresh else None)

    def _drop_first(self, level: _Level, call: Call) -> None:
        if level.back and level.back[0][3] is call:
            heapq.heappop(level.back)
        else:
            level.fresh.popleft()

    def _sweep(self) -> None:
        for level in self._levels.values():
            level.fresh = deque(call for call in level.fresh if not call.ticket)
            level.back = [entry for entry in level.back if entry[3].ticket == entry[2]]
            heapq.heapify(level.back)
        self._ghosts = 0


def _ascending(heap: list[_Back]) -> Iterator[_Back]:
    """The entries of a heap in their order, at the cost of those that are taken: after an entry only its two children
    have become candidates."""
    ahead = [(heap[0], 0)] if heap else []
    while ahead:
        entry, place = heapq.heappop(ahead)
        yield entry
        for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heapq.heappush(ahead, (heap[child], child))
