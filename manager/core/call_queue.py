"""Waiting calls of one context: by priority, then the nearest deadline, then in order of arrival.

A level (one priority) has three parts. `fresh` is a deque of calls without a deadline that have never left it: they
arrive in order, so nothing is sorted, and every operation is O(1) amortized. `back` is a heap of calls with a deadline
and of those that were sent and came back (taken back, refused, evicted, survivors of a lost pilot): O(log n). `gangs`
is a heap of calls that want several libraries at once: calls for one library may pass them (`single`).

Calls without a deadline come after those of the same priority that have one. Where `by_deadline` is not set, the policy
plans with deadlines by itself, and here only arrival counts. A call that is `late` has no deadline any more.

Where `by_run_time` is set, calls of functions that are expected to run shortly come first: a call stands as if it had
come later by `YIELDS` times what it is expected to take. So it lets shorter ones pass for so long, and no longer. All
calls are in `back` then.

Calls that are *apart* (`put_apart`) wait for a library that the core chooses for them (see `retries`): they are the
last in order, and nothing takes them from the queue.

A call that leaves from the middle (cancelled, dropped, sent by a policy) is not searched for: its ticket no longer fits
its entry, which is skipped when its turn comes, or swept when such ghosts outnumber the rest.
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
    """What a queue needs of the calls of one group."""

    @property
    def options(self) -> CallOptions:
        """Their priority, deadline and gang."""

    @property
    def expected_s(self) -> float:
        """Seconds that one of them is expected to run, 0 = unknown. It changes only where `reorder` is called then."""


class Queued(Protocol):
    """What a queue needs of a call."""

    ticket: int
    late: bool

    @property
    def id(self) -> CallId:
        """Its number."""

    @property
    def submitted_at(self) -> float:
        """When it came."""

    @property
    def group(self) -> QueueOptions:
        """What it shares with others."""


C = TypeVar("C", bound=Queued)

# Its deadline, when it came, its id, its ticket, the call.
_Entry = tuple[float, float, int, int, C]

# The ticket of a call that has left. Every new call has ticket 0; those that come back get a number.
NOT_QUEUED = -1
_SWEEP_AT = 1000

YIELDS = 10.0  # A call lets shorter ones pass for this many times its own expected run time
_MOST_EXAMINED = 64


class _Level(Generic[C]):
    __slots__ = ("back", "fresh", "gangs")

    def __init__(self) -> None:
        self.fresh: deque[C] = deque()
        self.back: list[_Entry[C]] = []
        self.gangs: list[_Entry[C]] = []


class Queue(Generic[C]):
    """See the module's text. `count` is the number of calls that wait here; `gangs` the number of gangs among them, and
    `timed` that of calls with a deadline."""

    __slots__ = (
        "_by_deadline", "_by_run_time", "_ghosts", "_levels", "_order", "_tickets", "apart", "count", "gangs", "timed"
    )  # fmt: skip

    def __init__(self, *, by_deadline: bool = False, by_run_time: bool = False) -> None:
        self._by_deadline = by_deadline
        self._by_run_time = by_run_time
        self._levels: dict[int, _Level[C]] = {}
        self._order: list[int] = []
        self._tickets = 0
        self._ghosts = 0
        self.count = 0
        self.gangs = 0
        self.timed = 0
        self.apart: dict[int, C] = {}

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[C]:
        """Waiting calls, in their order."""
        for priority in reversed(self._order):
            level = self._levels[priority]
            back, gangs = (sorted(entry for entry in heap if _holds(entry)) for heap in (level.back, level.gangs))
            fresh = (call for call in level.fresh if not call.ticket)
            yield from heapq.merge(_calls(back), fresh, _calls(gangs), key=self._key)
        yield from self.apart.values()

    def first(self, limit: int, *, looks: int) -> list[C]:
        """Up to `limit` calls from the head, in their order. No part of a level is looked at further than `looks`
        entries: where more than that have left from the middle, later calls stand for those behind them. The queue
        stays as it is."""
        found: list[C] = []
        for priority in reversed(self._order):
            level = self._levels[priority]
            back, gangs = (filter(_holds, islice(_ascending(heap), looks)) for heap in (level.back, level.gangs))
            fresh = (call for call in islice(level.fresh, looks) if not call.ticket)
            calls = heapq.merge(_calls(back), fresh, _calls(gangs), key=self._key)
            found += islice(calls, limit - len(found))
            if len(found) == limit:
                return found
        found += islice(self.apart.values(), limit - len(found))
        return found

    # ---- coming

    def push(self, call: C) -> None:
        """Put a new call where its deadline puts it, else at the end of its priority."""
        self.extend([call])

    def extend(self, calls: list[C]) -> None:
        """Put new calls of one group into its line."""
        options = calls[0].group.options
        if self._by_run_time or options.gang[1] > 1 or (self._by_deadline and options.objective.deadline_at):
            for call in calls:
                self._enter(call)
        else:
            self._level(options.priority).fresh.extend(calls)
            self.count += len(calls)

    def put_back(self, call: C) -> None:
        """Put a call that was sent before where its deadline and its arrival put it."""
        self._tickets += 1
        call.ticket = self._tickets
        self._enter(call)

    @property
    def is_by_run_time(self) -> bool:
        """Whether what calls are expected to take counts."""
        return self._by_run_time

    def reorder(self) -> None:
        """What calls are expected to take has changed: each stands where that puts it."""
        for level in self._levels.values() if self._by_run_time else ():
            for heap in (level.back, level.gangs):
                waiting = [entry[4] for entry in heap if _holds(entry)]
                self._ghosts -= len(heap) - len(waiting)
                heap[:] = [(*self._key(call), call.ticket, call) for call in waiting]
                heapq.heapify(heap)

    def put_apart(self, call: C) -> None:
        """Let a call wait for a library that the core chooses for it."""
        self.apart[call.id] = call
        self.count += 1

    @staticmethod
    def mark_late(call: C) -> None:
        """A call that is in no queue has lost its deadline."""
        call.late = True

    def demote(self, call: C) -> None:
        """The deadline of a waiting call is lost: it stands behind those that can be in time."""
        self.leave(call)
        self.mark_late(call)
        self.put_back(call)

    # ---- going

    def leave(self, call: C) -> None:
        """A waiting call leaves from wherever it is."""
        self.count -= 1
        call.ticket = NOT_QUEUED
        if self.apart.pop(call.id, None) is not None:
            return
        if call.group.options.gang[1] > 1:
            self.gangs -= 1
        if self.timed and self._is_timed(call):
            self.timed -= 1
        self._ghosts += 1
        if self._ghosts > _SWEEP_AT and self._ghosts > self.count:
            self._sweep()

    def head(self) -> C | None:
        """The call whose turn is next, a gang or not, or None."""
        single = self.single()
        if self.gangs:
            gang = self.gang()
            if gang is not None and (single is None or self.is_before(gang, single)):
                return gang
        if single is None and self.apart:
            return next(iter(self.apart.values()))
        return single

    def single(self) -> C | None:
        """The next call that one library can run by itself, or None."""
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
        """The next call that wants several libraries, or None; with `most`, the next that can run on `most` libraries.
        Only the first `_MOST_EXAMINED` of each priority are looked at."""
        if not self.gangs:
            return None
        for priority in reversed(self._order):
            level = self._levels[priority]
            first = self._first_gang(level)
            if first is None or not most or first.group.options.gang[0] <= most:
                if first is not None:
                    return first
                continue
            for entry in islice(_ascending(level.gangs), _MOST_EXAMINED):
                if _holds(entry) and entry[4].group.options.gang[0] <= most:
                    return entry[4]
        return None

    def nearest(self) -> Iterator[C]:
        """Of each priority the single call and the gang with the nearest deadline."""
        if self.timed:
            for level in self._levels.values():
                for heap in (level.back, level.gangs):
                    self._drop_ghosts(heap)
                    if heap and heap[0][0] < math.inf:
                        yield heap[0][4]

    def waiting_gangs(self) -> Iterator[C]:
        """All that want several libraries, in no order."""
        if self.gangs:
            yield from _calls(entry for level in self._levels.values() for entry in level.gangs if _holds(entry))

    def is_before(self, one: C, other: C) -> bool:
        """True if the turn of one waiting call comes before that of the other."""
        return self.rank(one) < self.rank(other)

    def rank(self, call: C) -> tuple[int, float, float, int]:
        """A call's place: the smallest comes first."""
        return (-call.group.options.priority, *self._key(call))

    def take(self, group: QueueOptions, limit: int) -> list[C]:
        """Take up to `limit` calls of one group from the head of the calls for one library (`single`), which is of that
        group."""
        level = self._levels[group.options.priority]
        taken: list[C] = []
        while level.back and len(taken) < limit:
            call = self._first(level)
            if call is None or call.group is not group:
                break
            self._drop_first(level, call)
            taken.append(call)
        if not level.back:
            fresh = level.fresh
            while fresh and len(taken) < limit:
                for _ in range(min(limit - len(taken), len(fresh))):  # the hot path
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
            self.timed -= sum(map(self._is_timed, taken))
        return taken

    # ---- inside

    def _is_timed(self, call: C) -> bool:
        return self._by_deadline and not call.late and call.group.options.objective.deadline_at > 0

    def _key(self, call: C) -> tuple[float, float, int]:
        """What decides within a priority."""
        due_at = call.group.options.objective.deadline_at if self._is_timed(call) else math.inf
        later_s = YIELDS * call.group.expected_s if self._by_run_time else 0.0
        return due_at, call.submitted_at + later_s, call.id

    def _enter(self, call: C) -> None:
        level, options = self._level(call.group.options.priority), call.group.options
        heap = level.gangs if options.gang[1] > 1 else level.back
        heapq.heappush(heap, (*self._key(call), call.ticket, call))
        self.count += 1
        self.timed += self._is_timed(call)
        self.gangs += heap is level.gangs

    def _level(self, priority: int) -> _Level[C]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            insort(self._order, priority)
        return level

    def _first(self, level: _Level[C]) -> C | None:
        """The first call of a level that is no gang; ghosts before it are dropped."""
        fresh, back = level.fresh, level.back
        while fresh and fresh[0].ticket:
            fresh.popleft()
            self._ghosts -= 1
        if not back:
            return fresh[0] if fresh else None
        self._drop_ghosts(back)
        if back and fresh:
            call = fresh[0]
            return back[0][4] if back[0][:3] <= (math.inf, call.submitted_at, call.id) else call
        return back[0][4] if back else (fresh[0] if fresh else None)

    def _first_gang(self, level: _Level[C]) -> C | None:
        self._drop_ghosts(level.gangs)
        return level.gangs[0][4] if level.gangs else None

    def _drop_ghosts(self, heap: list[_Entry[C]]) -> None:
        while heap and not _holds(heap[0]):
            heapq.heappop(heap)
            self._ghosts -= 1

    def _drop_first(self, level: _Level[C], call: C) -> None:
        if level.back and level.back[0][4] is call:
            heapq.heappop(level.back)
        else:
            level.fresh.popleft()

    def _sweep(self) -> None:
        for level in self._levels.values():
            level.fresh = deque(call for call in level.fresh if not call.ticket)
            for heap in (level.back, level.gangs):
                heap[:] = filter(_holds, heap)
                heapq.heapify(heap)
        self._ghosts = 0


def _holds(entry: _Entry[C]) -> bool:
    """True while the call waits at this place."""
    return entry[4].ticket == entry[3]


def _calls(entries: Iterator[_Entry[C]] | list[_Entry[C]]) -> Iterator[C]:
    return (entry[4] for entry in entries)


def _ascending(heap: list[_Entry[C]]) -> Iterator[_Entry[C]]:
    """The entries of a heap in their order, at the cost of those that are taken: after an entry only its two children
    have become candidates."""
    ahead = [(heap[0], 0)] if heap else []
    while ahead:
        entry, place = heapq.heappop(ahead)
        yield entry
        for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heapq.heappush(ahead, (heap[child], child))
