"""Queue a context's waiting calls by priority, then deadline, then arrival.

The queue of each priority has three parts. `fresh` is a deque of new calls without a deadline (O(1) amortized). `back`
is a heap of calls with a deadline and of requeued calls (O(log n)). `gangs` is a heap of calls that need several
libraries. Calls that need one library may start before gang calls (`single`).

With `by_run_time`, a call is sorted by its arrival time plus `YIELDS` times its expected run time. `take` returns no
calls that wait *apart* (see `retries`). A removed call leaves a *ghost*: an entry with an old ticket. The queue skips
ghosts and removes them later.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from stoker.protocol.calls import CallOptions
from stoker.protocol.ids import CallId


class QueueOptions(Protocol):
    options: CallOptions

    @property
    def expected_s(self) -> float:
        """Expected run time of a call in seconds; 0 = unknown. Call `Queue.reorder` after a change."""


class Queued(Protocol):
    id: CallId
    submitted_at: float
    ticket: int
    late: bool

    @property
    def group(self) -> QueueOptions:
        """The group of calls that share this call's function and options."""


C = TypeVar("C", bound=Queued)

# An entry of a heap: the deadline, arrival time, id and ticket of a call, and the call.
_Entry = tuple[float, float, int, int, C]

NOT_QUEUED = -1  # Ticket of a call that left the queue. New calls have ticket 0, requeued calls a positive ticket
_SWEEP_AT = 1000
YIELDS = 10.0  # With `by_run_time`, a call is sorted as if it had arrived this many run times later
_MOST_EXAMINED = 64


class _Level(Generic[C]):
    __slots__ = ("back", "fresh", "gangs")

    def __init__(self) -> None:
        self.fresh: deque[C] = deque()
        self.back: list[_Entry[C]] = []
        self.gangs: list[_Entry[C]] = []


class Queue(Generic[C]):
    """Waiting calls of a context. `gangs`: number of calls that need several libraries. `timed`: number sorted by
    deadline.
    """

    __slots__ = (
        "_by_deadline", "_ghosts", "_levels", "_order", "_tickets", "apart", "count", "gangs", "is_by_run_time", "timed"
    )  # fmt: skip

    def __init__(self, *, by_deadline: bool = False, by_run_time: bool = False) -> None:
        self._by_deadline = by_deadline
        self.is_by_run_time = by_run_time
        self._levels: dict[int, _Level[C]] = {}
        self._order: list[int] = []
        self._tickets = 0
        self._ghosts = 0
        self.count = 0
        self.gangs = 0
        self.timed = 0
        self.apart: dict[int, C] = {}

    def __iter__(self) -> Iterator[C]:
        return self._iterate(looks=None)

    def first(self, limit: int, *, looks: int) -> list[C]:
        """Return the first `limit` calls. Examine at most `looks` entries of each part of the queue."""
        return list(islice(self._iterate(looks=looks), limit))

    def _iterate(self, *, looks: int | None) -> Iterator[C]:
        for priority in reversed(self._order):
            level = self._levels[priority]
            back, gangs = (
                filter(_is_current, islice(_iterate_heap_sorted(heap), looks)) for heap in (level.back, level.gangs)
            )
            fresh = (call for call in islice(level.fresh, looks) if not call.ticket)
            yield from heapq.merge(_calls(back), fresh, _calls(gangs), key=self._key)
        yield from self.apart.values()

    def extend(self, calls: list[C]) -> None:
        options = calls[0].group.options
        if self.is_by_run_time or options.gang[1] > 1 or (self._by_deadline and options.objective.deadline_at):
            for call in calls:
                self._enter(call)
        else:
            self._level(options.priority).fresh.extend(calls)
            self.count += len(calls)

    def put_back(self, call: C) -> None:
        self._tickets += 1
        call.ticket = self._tickets
        self._enter(call)

    def reorder(self) -> None:
        for level in self._levels.values() if self.is_by_run_time else ():
            for heap in (level.back, level.gangs):
                waiting = [entry[4] for entry in heap if _is_current(entry)]
                self._ghosts -= len(heap) - len(waiting)
                heap[:] = [(*self._key(call), call.ticket, call) for call in waiting]
                heapq.heapify(heap)

    def hold_back(self, call: C) -> None:
        self.apart[call.id] = call
        self.count += 1

    def demote(self, call: C) -> None:
        """Move a waiting call behind the calls with deadlines, and ignore its own deadline from now on."""
        self.leave(call)
        call.late = True
        self.put_back(call)

    def leave(self, call: C) -> None:
        self.count -= 1
        call.ticket = NOT_QUEUED
        if self.apart.pop(call.id, None) is not None:
            return
        if call.group.options.gang[1] > 1:
            self.gangs -= 1
        if self.timed and self._has_active_deadline(call):
            self.timed -= 1
        self._ghosts += 1
        if self._ghosts > _SWEEP_AT and self._ghosts > self.count:
            self._sweep()

    def head(self) -> C | None:
        single = self.single()
        if self.gangs:
            gang = self.gang()
            if gang is not None and (single is None or self.is_before(gang, single)):
                return gang
        if single is None and self.apart:
            return next(iter(self.apart.values()))
        return single

    def single(self) -> C | None:
        order = self._order
        while order:
            level = self._levels[order[-1]]
            call = self._first(level)
            if call is not None:
                return call
            if self._first_gang(level) is not None:
                lower = (self._first(self._levels[priority]) for priority in reversed(order[:-1]))
                return next((call for call in lower if call is not None), None)
            del self._levels[order.pop()]
        return None

    def gang(self, *, most: int = 0) -> C | None:
        """Return the next gang call that needs at most `most` libraries (0 = any number), or None."""
        if not self.gangs:
            return None
        for priority in reversed(self._order):
            level = self._levels[priority]
            first = self._first_gang(level)
            if first is not None and (not most or first.group.options.gang[0] <= most):
                return first
            for entry in islice(_iterate_heap_sorted(level.gangs), _MOST_EXAMINED):
                if _is_current(entry) and entry[4].group.options.gang[0] <= most:
                    return entry[4]
        return None

    def nearest(self) -> Iterator[C]:
        """Yield the waiting call with the nearest deadline from each part of the queue."""
        if self.timed:
            for level in self._levels.values():
                for heap in (level.back, level.gangs):
                    self._drop_stale_entries(heap)
                    if heap and heap[0][0] < math.inf:
                        yield heap[0][4]

    def waiting_gangs(self) -> Iterator[C]:
        if self.gangs:
            yield from _calls(entry for level in self._levels.values() for entry in level.gangs if _is_current(entry))

    def is_before(self, one: C, other: C) -> bool:
        return self.rank(one) < self.rank(other)

    def rank(self, call: C) -> tuple[int, float, float, int]:
        return (-call.group.options.priority, *self._key(call))

    def take(self, group: QueueOptions, limit: int) -> list[C]:
        level = self._levels[group.options.priority]
        taken: list[C] = []
        while level.back and len(taken) < limit:
            call = self._first(level)
            if call is None or call.group is not group:
                break
            if level.back and level.back[0][4] is call:
                heapq.heappop(level.back)
            else:
                level.fresh.popleft()
            taken.append(call)
        if not level.back:
            fresh = level.fresh
            while fresh and len(taken) < limit:
                for _ in range(min(limit - len(taken), len(fresh))):  # this loop must be fast
                    call = fresh.popleft()
                    if call.ticket:
                        self._ghosts -= 1
                    elif call.group is group:
                        taken.append(call)
                    else:
                        fresh.appendleft(call)
                        limit = len(taken)
                        break
        self.count -= len(taken)
        if self.timed:
            self.timed -= sum(map(self._has_active_deadline, taken))
        return taken

    def _has_active_deadline(self, call: C) -> bool:
        return self._by_deadline and not call.late and call.group.options.objective.deadline_at > 0

    def _key(self, call: C) -> tuple[float, float, int]:
        due_at = call.group.options.objective.deadline_at if self._has_active_deadline(call) else math.inf
        later_s = YIELDS * call.group.expected_s if self.is_by_run_time else 0.0
        return due_at, call.submitted_at + later_s, call.id

    def _enter(self, call: C) -> None:
        level, options = self._level(call.group.options.priority), call.group.options
        heap = level.gangs if options.gang[1] > 1 else level.back
        heapq.heappush(heap, (*self._key(call), call.ticket, call))
        self.count += 1
        self.timed += self._has_active_deadline(call)
        self.gangs += heap is level.gangs

    def _level(self, priority: int) -> _Level[C]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            insort(self._order, priority)
        return level

    def _first(self, level: _Level[C]) -> C | None:
        fresh, back = level.fresh, level.back
        while fresh and fresh[0].ticket:
            fresh.popleft()
            self._ghosts -= 1
        if not back:
            return fresh[0] if fresh else None
        self._drop_stale_entries(back)
        if back and fresh:
            call = fresh[0]
            return back[0][4] if back[0][:3] <= (math.inf, call.submitted_at, call.id) else call
        return back[0][4] if back else (fresh[0] if fresh else None)

    def _first_gang(self, level: _Level[C]) -> C | None:
        self._drop_stale_entries(level.gangs)
        return level.gangs[0][4] if level.gangs else None

    def _drop_stale_entries(self, heap: list[_Entry[C]]) -> None:
        while heap and not _is_current(heap[0]):
            heapq.heappop(heap)
            self._ghosts -= 1

    def _sweep(self) -> None:
        for level in self._levels.values():
            level.fresh = deque(call for call in level.fresh if not call.ticket)
            for heap in (level.back, level.gangs):
                heap[:] = filter(_is_current, heap)
                heapq.heapify(heap)
        self._ghosts = 0


def _is_current(entry: _Entry[C]) -> bool:
    return entry[4].ticket == entry[3]


def _calls(entries: Iterator[_Entry[C]] | list[_Entry[C]]) -> Iterator[C]:
    return (entry[4] for entry in entries)


def _iterate_heap_sorted(heap: list[_Entry[C]]) -> Iterator[_Entry[C]]:
    ahead = [(heap[0], 0)] if heap else []
    while ahead:
        entry, place = heapq.heappop(ahead)
        yield entry
        for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heapq.heappush(ahead, (heap[child], child))
