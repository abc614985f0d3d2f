"""Queue a context's waiting calls by priority, then deadline, then arrival.

For each priority the queue has three parts. `fresh` is a deque of new calls without a deadline (O(1) amortized). `back`
is a heap of calls with a deadline and of requeued calls (O(log n)). `gangs` is a heap of gang calls, which need several
libraries. A call that needs one library may start before a gang call (`first_single_call`).

With `by_run_time`, a call is sorted by its arrival time plus `RUN_TIME_WEIGHT` times its expected run time. Calls that
are set aside (see `retries`) are counted, but `take_calls` does not return them. If a call is removed, its entry stays
in the queue as a *ghost* with an old ticket. The queue skips ghosts, and removes them later.
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


class QueuedGroup(Protocol):
    options: CallOptions

    @property
    def expected_run_time_s(self) -> float:
        """Expected run time of a call in seconds; 0 = unknown. Call `Queue.reorder` if this value has changed."""


class QueuedCall(Protocol):
    id: CallId
    submitted_at: float
    ticket: int
    late: bool

    @property
    def group(self) -> QueuedGroup:
        """The group of calls that share this call's function and options."""


C = TypeVar("C", bound=QueuedCall)

# A heap entry: deadline, arrival time, id and ticket of a call, and the call. Old tickets are stale.
_Entry = tuple[float, float, int, int, C]

NOT_QUEUED = -1  # Ticket of a call that is not in the queue. New calls have ticket 0, requeued calls a positive one
_GHOSTS_BEFORE_SWEEP = 1000
RUN_TIME_WEIGHT = 10.0  # With `by_run_time`, a call is sorted as if it had arrived this many run times later
_MAX_EXAMINED = 64


class _PriorityLevel(Generic[C]):
    __slots__ = ("back", "fresh", "gangs")

    def __init__(self) -> None:
        self.fresh: deque[C] = deque()
        self.back: list[_Entry[C]] = []
        self.gangs: list[_Entry[C]] = []


class Queue(Generic[C]):
    """Waiting calls of a context. `gang_count`: number of calls that need several libraries. `deadline_count`: number
    of calls that are sorted by their deadlines.
    """

    __slots__ = (
        "_by_deadline", "_ghosts", "_last_ticket", "_levels", "_priorities", "count", "deadline_count", "gang_count",
        "is_by_run_time", "set_aside_calls",
    )  # fmt: skip

    def __init__(self, *, by_deadline: bool = False, by_run_time: bool = False) -> None:
        self._by_deadline = by_deadline
        self.is_by_run_time = by_run_time
        self._levels: dict[int, _PriorityLevel[C]] = {}
        self._priorities: list[int] = []
        self._last_ticket = 0
        self._ghosts = 0
        self.count = 0
        self.gang_count = 0
        self.deadline_count = 0
        self.set_aside_calls: dict[int, C] = {}

    def __iter__(self) -> Iterator[C]:
        return self._iterate(max_examined=None)

    def first_calls(self, limit: int, *, max_examined: int) -> list[C]:
        """Return the first `limit` calls. Examine at most `max_examined` entries of each list and heap in the queue."""
        return list(islice(self._iterate(max_examined=max_examined), limit))

    def _iterate(self, *, max_examined: int | None) -> Iterator[C]:
        for priority in reversed(self._priorities):
            level = self._levels[priority]
            back, gangs = (
                filter(_is_current, islice(_iterate_heap_sorted(heap), max_examined))
                for heap in (level.back, level.gangs)
            )
            fresh = (call for call in islice(level.fresh, max_examined) if not call.ticket)
            yield from heapq.merge(
                _calls_of_entries(back), fresh, _calls_of_entries(gangs), key=self._deadline_and_arrival
            )
        yield from self.set_aside_calls.values()

    def extend(self, calls: list[C]) -> None:
        options = calls[0].group.options
        if self.is_by_run_time or options.gang[1] > 1 or (self._by_deadline and options.objective.deadline_at):
            for call in calls:
                self._push_call(call)
        else:
            self._get_or_create_level(options.priority).fresh.extend(calls)
            self.count += len(calls)

    def put_back(self, call: C) -> None:
        self._last_ticket += 1
        call.ticket = self._last_ticket
        self._push_call(call)

    def reorder(self) -> None:
        for level in self._levels.values() if self.is_by_run_time else ():
            for heap in (level.back, level.gangs):
                waiting = [entry[4] for entry in heap if _is_current(entry)]
                self._ghosts -= len(heap) - len(waiting)
                heap[:] = [(*self._deadline_and_arrival(call), call.ticket, call) for call in waiting]
                heapq.heapify(heap)

    def set_aside(self, call: C) -> None:
        self.set_aside_calls[call.id] = call
        self.count += 1

    def demote(self, call: C) -> None:
        """Ignore the deadline of a waiting call from now on, and move the call behind the calls with deadlines."""
        self.remove(call)
        call.late = True
        self.put_back(call)

    def remove(self, call: C) -> None:
        self.count -= 1
        call.ticket = NOT_QUEUED
        if self.set_aside_calls.pop(call.id, None) is not None:
            return
        if call.group.options.gang[1] > 1:
            self.gang_count -= 1
        if self.deadline_count and self._has_active_deadline(call):
            self.deadline_count -= 1
        self._ghosts += 1
        if self._ghosts > _GHOSTS_BEFORE_SWEEP and self._ghosts > self.count:
            self._remove_ghosts()

    def head(self) -> C | None:
        single = self.first_single_call()
        if self.gang_count:
            gang = self.first_gang_call()
            if gang is not None and (single is None or self.is_before(gang, single)):
                return gang
        if single is None and self.set_aside_calls:
            return next(iter(self.set_aside_calls.values()))
        return single

    def first_single_call(self) -> C | None:
        order = self._priorities
        while order:
            level = self._levels[order[-1]]
            call = self._first_single_call_of_level(level)
            if call is not None:
                return call
            if self._first_gang_call_of_level(level) is not None:
                lower = (self._first_single_call_of_level(self._levels[priority]) for priority in reversed(order[:-1]))
                return next((call for call in lower if call is not None), None)
            del self._levels[order.pop()]
        return None

    def first_gang_call(self, *, max_libraries: int = 0) -> C | None:
        """Return the next gang call that needs at most `max_libraries` libraries (0 = any number), or None."""
        if not self.gang_count:
            return None
        for priority in reversed(self._priorities):
            level = self._levels[priority]
            first = self._first_gang_call_of_level(level)
            if first is not None and (not max_libraries or first.group.options.gang[0] <= max_libraries):
                return first
            for entry in islice(_iterate_heap_sorted(level.gangs), _MAX_EXAMINED):
                if _is_current(entry) and entry[4].group.options.gang[0] <= max_libraries:
                    return entry[4]
        return None

    def calls_with_nearest_deadlines(self) -> Iterator[C]:
        """From each heap of the queue, yield the call with the nearest deadline."""
        if self.deadline_count:
            for level in self._levels.values():
                for heap in (level.back, level.gangs):
                    self._drop_stale_entries(heap)
                    if heap and heap[0][0] < math.inf:
                        yield heap[0][4]

    def waiting_gang_calls(self) -> Iterator[C]:
        if self.gang_count:
            yield from _calls_of_entries(
                entry for level in self._levels.values() for entry in level.gangs if _is_current(entry)
            )

    def is_before(self, one: C, other: C) -> bool:
        return self.sort_key(one) < self.sort_key(other)

    def sort_key(self, call: C) -> tuple[int, float, float, int]:
        return (-call.group.options.priority, *self._deadline_and_arrival(call))

    def take_calls(self, group: QueuedGroup, limit: int) -> list[C]:
        level = self._levels[group.options.priority]
        taken: list[C] = []
        while level.back and len(taken) < limit:
            call = self._first_single_call_of_level(level)
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
                # this loop runs for every call, so it must be fast
                for _ in range(min(limit - len(taken), len(fresh))):
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
        if self.deadline_count:
            self.deadline_count -= sum(map(self._has_active_deadline, taken))
        return taken

    def _has_active_deadline(self, call: C) -> bool:
        return self._by_deadline and not call.late and call.group.options.objective.deadline_at > 0

    def _deadline_and_arrival(self, call: C) -> tuple[float, float, int]:
        due_at = call.group.options.objective.deadline_at if self._has_active_deadline(call) else math.inf
        later_s = RUN_TIME_WEIGHT * call.group.expected_run_time_s if self.is_by_run_time else 0.0
        return due_at, call.submitted_at + later_s, call.id

    def _push_call(self, call: C) -> None:
        level, options = self._get_or_create_level(call.group.options.priority), call.group.options
        heap = level.gangs if options.gang[1] > 1 else level.back
        heapq.heappush(heap, (*self._deadline_and_arrival(call), call.ticket, call))
        self.count += 1
        self.deadline_count += self._has_active_deadline(call)
        self.gang_count += heap is level.gangs

    def _get_or_create_level(self, priority: int) -> _PriorityLevel[C]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityLevel()
            insort(self._priorities, priority)
        return level

    def _first_single_call_of_level(self, level: _PriorityLevel[C]) -> C | None:
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

    def _first_gang_call_of_level(self, level: _PriorityLevel[C]) -> C | None:
        self._drop_stale_entries(level.gangs)
        return level.gangs[0][4] if level.gangs else None

    def _drop_stale_entries(self, heap: list[_Entry[C]]) -> None:
        while heap and not _is_current(heap[0]):
            heapq.heappop(heap)
            self._ghosts -= 1

    def _remove_ghosts(self) -> None:
        for level in self._levels.values():
            level.fresh = deque(call for call in level.fresh if not call.ticket)
            for heap in (level.back, level.gangs):
                heap[:] = filter(_is_current, heap)
                heapq.heapify(heap)
        self._ghosts = 0


def _is_current(entry: _Entry[C]) -> bool:
    return entry[4].ticket == entry[3]


def _calls_of_entries(entries: Iterator[_Entry[C]] | list[_Entry[C]]) -> Iterator[C]:
    return (entry[4] for entry in entries)


def _iterate_heap_sorted(heap: list[_Entry[C]]) -> Iterator[_Entry[C]]:
    ahead = [(heap[0], 0)] if heap else []
    while ahead:
        entry, place = heapq.heappop(ahead)
        yield entry
        for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heapq.heappush(ahead, (heap[child], child))
