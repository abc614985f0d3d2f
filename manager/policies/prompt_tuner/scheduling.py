"""Jobs that wait for one warm pool, in the order in which they are looked at, kept up to date a change at a time.

With thousands of jobs a round must cost what changed, not what waits. A job's *need* is the least number of replicas
with which it would be in time if it began now. It grows as time goes by and never shrinks, so jobs lie in rows by need,
each row in order of deadlines, and move to the next row when their latest start has passed (a heap says whose is next).
Whoever has some idle replicas looks at the heads of the rows that these would do for, and at nobody else.

Jobs that are late whatever they get, and those without a deadline, have rows of their own, behind all others.

How many devices each job with a deadline gets: PromptTuner's Workload Scheduler (§4.4), as arithmetic.

Jobs of one model share its *warm pool*: devices on which that model is loaded. All models share the *cold pool*:
devices that hold nothing. A job runs on several replicas at once and is done sooner. Two questions are asked in every
round, and both are answered here from times alone; `dispatch` and `residency` turn the answers into
actions.

- `allot` (Algorithm 1): which waiting jobs start now on devices that are warm and idle, and on how many each?
- `Walk` (Algorithm 2, with DelaySchedulable): which devices are to be warmed, for which jobs? A job that can wait for
  devices which running jobs will give back gets none. It also says when each job should be done.

Where we differ from the printed algorithms, and why:

- A deadline is a point in time. The paper's `T_slo` is a duration that never gets shorter while a job waits; jobs are
  sorted by deadline, and what is left until then is compared.
- Algorithm 1 grows while `A <= R`, and so gives up to R + 1 devices, and one where there are none. Here never more than
  there are. A job has a largest number of replicas of its own; more of them do not help it.
- Jobs that can make their deadline no more get nothing in Algorithm 1, for ever. Here they run last, on devices that
  are left over and that no delayed job counts on, with as few replicas as they can.
- Algorithm 2's loop runs while `T_slo < T_cold`, which ends at once or never. It grows while the deadline is missed
  and there are cold devices; all models take from one count of these.
- Line 19 notes durations where line 26 reads points in time. Devices that are being warmed are noted as free again
  at now + T_cold + T(A). They belong to the job that they were ordered for (`Promise`), and so do the idle ones that
  are to run beside them, in all rounds until it starts: each would order them anew otherwise.
- DelaySchedulable: `k` may be all devices of the pool; nobody gets a device before now; and all k devices are taken
  until the job is done, for it needs them together.
- Only what idle devices do not cover is ordered.
- A delay binds nobody: reservations are made anew in each round, by deadline. They trust the bounds of run times, as
  the paper does. Once a job's slack is shorter than a load nothing can be warmed for it, so it waits for what it has.
- Nobody's time is known before a model's first job has run. Such a job measures: it gets the fewest replicas that it
  can run on, at once, and nobody waits for those.

A round over thousands of jobs costs what changed: `allot` looks at the heads of `JobQueue`'s rows, and a walk goes on
in the next round where it stopped in the last. Times are in seconds, on the manager's clock. A replica may be several
devices: callers count replicas.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Protocol

import msgspec

# ---- job queue


Key = tuple[int, float, int]
"""A job's place in line: `HOPEFUL`, `LATE` or `REST`; its deadline (of the rest: less its priority); its id."""

HOPEFUL, LATE, REST = 0, 1, 2
FRONT: Key = (-1, 0.0, 0)
"""Before all jobs."""

_EARLY_S = 1e-6
"""A job's need is looked at again so much before its latest start, which is known up to rounding."""
_FEW = 8
"""So many jobs are put into a row one by one; of more the row is sorted."""


class PoolJob(msgspec.Struct, frozen=True, gc=False):
    """A job that waits. `run_s[a - 1]`: an upper bound of its time on `a` replicas, meeting included, not longer for
    more of them. `deadline_at`: 0 = none, then it runs when nobody else wants to, in order of `priority`. `least`: the
    fewest replicas that it can run on. One that `measures` runs on these, for nobody knows how long it takes."""

    id: int
    deadline_at: float
    run_s: tuple[float, ...]
    least: int = 1
    measures: bool = False
    priority: int = 0

    def fewest(self, *, begins_at: float, most: int) -> int:
        """The least number of replicas, up to `most`, with which the job ends in time; 0 if none is enough."""
        for count, seconds in enumerate(self.run_s[:most], start=1):
            if begins_at + seconds <= self.deadline_at:
                return count
        return 0

    def is_lost(self, now: float) -> bool:
        """Whether it is late however many replicas it gets, were they warm."""
        return now + self.run_s[-1] > self.deadline_at


def by_deadline(jobs: Iterable[PoolJob]) -> list[PoolJob]:
    """Those with a deadline first, the nearest before all; then the others, oldest first."""
    return sorted(jobs, key=lambda job: (not job.deadline_at, job.deadline_at or -job.priority, job.id))


class JobQueue:
    """See the module's text. `now` never goes back."""

    __slots__ = ("_due", "_keys", "_needs", "_turns", "jobs", "late", "rest", "rows")

    def __init__(self) -> None:
        self.jobs: dict[int, PoolJob] = {}
        self.rows: dict[int, list[Key]] = {}
        """Jobs that can be in time, by their need."""
        self.late: list[Key] = []
        """Those that cannot."""
        self.rest: list[Key] = []
        """Those that need not."""
        self._keys: dict[int, Key] = {}
        self._needs: dict[int, int] = {}
        self._due: dict[int, float] = {}
        """When the need of each that can be in time may have grown."""
        self._turns: list[tuple[float, int]] = []
        """The same as a heap. An entry that does not agree is old; when many come they are swept."""

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def hopeful(self) -> bool:
        """Whether any can be in time."""
        return any(self.rows.values())

    def put(self, jobs: Iterable[PoolJob], *, now: float) -> None:
        """Add these, or put them in the place of those with the same ids."""
        fresh: dict[int, list[Key]] = {}
        turns: list[tuple[float, int]] = []
        for job in jobs:
            id, deadline_at = job.id, job.deadline_at
            if id in self.jobs:
                self.remove(id)
            self.jobs[id] = job
            if not deadline_at:
                need, key = -1, (REST, -float(job.priority), id)
            else:
                run_s = job.run_s
                need = 1 if now + run_s[0] <= deadline_at else job.fewest(begins_at=now, most=len(run_s))
                key = (HOPEFUL if need else LATE, deadline_at, id)
                if need:
                    self._due[id] = at = deadline_at - run_s[need - 1] - _EARLY_S
                    turns.append((at, id))
            self._keys[id], self._needs[id] = key, need
            if need in fresh:
                fresh[need].append(key)
            else:
                fresh[need] = [key]
        if len(turns) <= _FEW:
            for turn in turns:
                heapq.heappush(self._turns, turn)
        else:
            self._turns = [(at, id) for at, id in self._turns if self._due.get(id) == at] + turns
            heapq.heapify(self._turns)
        for need, keys in fresh.items():
            row = self._row(need)
            if len(keys) <= _FEW:
                for key in keys:
                    insort(row, key)
            else:
                row += keys
                row.sort()

    def remove(self, id: int) -> None:
        """A job waits no more. One that is not here is none."""
        if self.jobs.pop(id, None) is None:
            return
        row, key = self._row(self._needs.pop(id)), self._keys.pop(id)
        del row[bisect_left(row, key)]
        self._due.pop(id, None)

    def advance(self, now: float) -> bool:
        """Jobs whose latest start with what they needed has passed need more now, or are late. Whether any does."""
        moved = False
        turns = self._turns
        while turns and turns[0][0] <= now:
            at, id = heapq.heappop(turns)
            if self._due.get(id) != at:
                continue
            job, need, key = self.jobs[id], self._needs[id], self._keys[id]
            grown = job.fewest(begins_at=now, most=len(job.run_s))
            if grown:
                self._set_alarm(id, max(now + _EARLY_S, job.deadline_at - job.run_s[grown - 1] - _EARLY_S))
            else:
                del self._due[id]
            if grown == need:
                continue
            moved = True
            row = self._row(need)
            del row[bisect_left(row, key)]
            key = (HOPEFUL if grown else LATE, job.deadline_at, id)
            self._keys[id], self._needs[id] = key, grown
            insort(self._row(grown), key)
        return moved

    def is_hopeful(self, id: int) -> bool:
        """Whether a job is here that can be in time."""
        return self._needs.get(id, 0) > 0

    def need(self, id: int) -> int:
        """With how many replicas a job would be in time if it began now; 0 = it is late, or has no deadline."""
        return max(0, self._needs.get(id, 0))

    def key(self, id: int) -> Key:
        """A job's place."""
        return self._keys[id]

    def first(self, *, after: Key, most: int, but: Iterable[int] = ()) -> Key | None:
        """Of the jobs that so many replicas would do for, the first behind this place that is none of those."""
        found: Key | None = None
        for need, row in self.rows.items():
            if need > most:
                continue
            place = bisect_right(row, after)
            while place < len(row) and row[place][2] in but:
                place += 1
            if place < len(row) and (found is None or row[place] < found):
                found = row[place]
        return found

    def behind(self, after: Key) -> Iterator[Key]:
        """All jobs behind this place, in order. They stay as they are meanwhile."""
        rows = [row for row in (*self.rows.values(), self.late, self.rest) if row and row[-1] > after]
        ways = [_from(row, bisect_right(row, after)) for row in rows]
        return heapq.merge(*ways) if len(ways) > 1 else iter(ways[0] if ways else ())

    def _set_alarm(self, id: int, at: float) -> None:
        self._due[id] = at
        heapq.heappush(self._turns, (at, id))

    def _row(self, need: int) -> list[Key]:
        if need > 0:
            row = self.rows.get(need)
            if row is None:
                row = self.rows[need] = []
            return row
        return self.rest if need else self.late


def _from(row: list[Key], place: int) -> Iterator[Key]:
    for at in range(place, len(row)):
        yield row[at]


# ---- scheduling


class Promise(msgspec.Struct, frozen=True):
    """Replicas that are being warmed for a job: so many, of which `here` have come already, to run together with
    `beside` others that were idle when they were ordered. `free_at`: when the job will be done with all of them."""

    job: int
    replicas: int
    beside: int = 0
    here: int = 0
    free_at: float = 0.0

    @property
    def kept(self) -> int:
        """Idle replicas that wait with the job for the rest."""
        return self.beside + self.here


class Pool(msgspec.Struct, frozen=True):
    """A model's pool as a round finds it. `idle`: warm replicas that nobody uses, those that are kept for promises and
    those in `held` among them. `busy`: when each of the others will be free, as far as is known. `cold_s`: what warming
    one takes. `held`: idle replicas that a job has taken for itself until it has enough (an ablation)."""

    idle: int
    busy: tuple[float, ...] = ()
    promised: tuple[Promise, ...] = ()
    cold_s: float = 0.0
    held: Mapping[int, int] = {}

    @property
    def unkept(self) -> int:
        """Idle replicas that are anybody's."""
        return max(0, self.idle - sum(promise.kept for promise in self.promised) - sum(self.held.values()))


# ---- Algorithm 1

_Take = Callable[[PoolJob, int], bool]


def _whatever(job: PoolJob, count: int) -> bool:  # noqa: ARG001
    return True


def allot(line: JobQueue, pool: Pool, *, now: float, take: _Take = _whatever) -> dict[int, int]:
    """Replicas for jobs that start now, by job. What is kept for a job that starts without it, or that does not wait
    any more, is anybody's. `take` is asked before a job is given so many, and may refuse: then it waits."""
    line.advance(now)
    kept = {each.job: min(each.kept, pool.idle) for each in pool.promised if each.job in line.jobs}
    kept.update({id: min(count, pool.idle) for id, count in pool.held.items() if id in line.jobs})
    idle = max(0, pool.idle - sum(kept.values()))
    given: dict[int, int] = {}
    done, passed = set(kept), FRONT
    while key := _next(line, kept, after=passed, idle=idle, done=done):
        passed, job, mine = key, line.jobs[key[2]], kept.get(key[2], 0)
        count = job.fewest(begins_at=now, most=idle + mine)
        if not count:
            continue
        done.add(job.id)
        kept.pop(job.id, None)
        if not take(job, count):
            continue
        given[job.id] = count
        idle += mine - count
        if mine > count:  # somebody who was passed may want what it gave back
            passed = FRONT
    if idle and (line.late or line.rest) and not _counted_on(line, pool, done, idle=idle, now=now):
        _give_rest(line, pool, given, idle=idle, take=take)
    return given


def _next(line: JobQueue, kept: Mapping[int, int], *, after: Key, idle: int, done: set[int]) -> Key | None:
    """Who is looked at next: the first for whom what is idle would do, or for whom something is kept."""
    found = line.first(after=after, most=idle, but=done) if idle else None
    for id in kept:
        if line.is_hopeful(id) and after < (key := line.key(id)) and (found is None or key < found):
            found = key
    return found


def _counted_on(line: JobQueue, pool: Pool, done: set[int], *, idle: int, now: float) -> bool:
    """Whether a job that waits needs the idle replicas together with others that come in time. It needs more than are
    idle, or it would have got them; so it needs all of these."""
    free = _free_at(pool, now=now, idle=idle)
    for row in line.rows.values():
        for _, _, id in reversed(row):  # those with much time left are the likeliest
            if id not in done and _slot(free, line.jobs[id]):
                return True
    return False


def _give_rest(line: JobQueue, pool: Pool, given: dict[int, int], *, idle: int, take: _Take) -> None:
    """Best effort. Nobody overtakes one that waits for more replicas than are idle, if the pool has so many."""
    for _, _, id in chain(line.late, line.rest):
        job = line.jobs[id]
        if job.least <= idle:
            if take(job, job.least):
                given[id] = job.least
                idle -= job.least
        elif job.least <= pool.idle + len(pool.busy):
            return
        if not idle:
            return


# ---- Algorithm 2


class ColdPool(Protocol):
    """The cold pool."""

    def count(self, model: str, *, most: int) -> int:
        """How many replicas of a model could be warmed just now; not counted further than `most`."""

    def take(self, model: str, count: int, *, job: int) -> None:
        """So many are warmed for a job."""


class Fate(msgspec.Struct, frozen=True):
    """What a walk finds out about a job that waits: when it should be done (infinite: nobody knows), and what was
    ordered for it. `helped`: it waits for devices of its own, or that others give back in time."""

    model: str
    job: PoolJob
    ends_at: float
    promise: Promise | None = None
    helped: bool = True


class Walk:
    """Algorithm 2 over the jobs of all models, the nearest deadline first; those that are late, or have none, at last.

    `delay`: without it no job waits for devices of others (an ablation).
    """

    def __init__(self, *, delay: bool = True) -> None:
        self.delay = delay
        self._at = FRONT
        self._now = 0.0
        self._pools: dict[str, Pool] = {}
        self._free: dict[str, list[float]] = {}
        self._served: dict[int, Promise] = {}
        self.under_way = False

    def begin(self, pools: Mapping[str, Pool], *, now: float) -> None:
        """From the front, over pools as they are now."""
        self._at, self._now, self.under_way = FRONT, now, True
        self._pools = dict(pools)
        self._free = {model: _free_at(pool, now=now, idle=pool.unkept) for model, pool in pools.items()}
        self._served = {promise.job: promise for pool in pools.values() for promise in pool.promised}

    def go_on(self, lines: Mapping[str, JobQueue], cold: ColdPool, *, looks: int) -> list[Fate]:
        """The next jobs in line, at most `looks` of them. The round is over when `under_way` is False."""
        fates: list[Fate] = []
        for key, model in self._ahead(lines):
            if len(fates) >= looks:
                return fates
            self._at = key
            job = lines[model].jobs[key[2]]
            fates.append(self._hopeful(model, job, cold) if key[0] == HOPEFUL else self._rest(model, job))
        self.under_way = False
        return fates

    def _ahead(self, lines: Mapping[str, JobQueue]) -> Iterator[tuple[Key, str]]:
        ways = [_named(line.behind(self._at), model) for model, line in lines.items() if line and model in self._pools]
        return heapq.merge(*ways) if len(ways) > 1 else iter(ways[0] if ways else ())

    def _hopeful(self, model: str, job: PoolJob, cold: ColdPool) -> Fate:
        pool, free, now = self._pools[model], self._free[model], self._now
        promise = self._served.get(job.id)
        if promise is not None:
            return Fate(model, job, max(promise.free_at, now))
        held = pool.held.get(job.id, 0)
        if not held:
            return self._waits(model, job, cold)
        idle = bisect_right(free, now)
        free[:0] = [now] * held
        found = self._waits(model, job, cold)
        del free[: max(0, bisect_right(free, now) - idle)]  # what it holds and does not need yet is nobody else's
        return found

    def _waits(self, model: str, job: PoolJob, cold: ColdPool) -> Fate:
        pool, free, now = self._pools[model], self._free[model], self._now
        slot = _slot(free, job) if self.delay and not job.measures else 0
        if slot:
            ends_at = free[slot - 1] + job.run_s[slot - 1]
            _reserve(free, slot, ends_at)
            return Fate(model, job, ends_at)
        idle = bisect_right(free, now)
        warm_at = now + pool.cold_s
        there = idle + cold.count(model, most=max(0, len(job.run_s) - idle))
        count = job.fewest(begins_at=warm_at, most=there)
        if not count:
            soonest = math.inf if job.measures else _soonest(free, job, warm_at=warm_at, there=there)
            return Fate(model, job, soonest, helped=False)
        ends_at = math.inf if job.measures else warm_at + job.run_s[count - 1]
        more = max(0, count - idle)
        _reserve(free, count - more, ends_at)
        if not more:  # it may start at once
            return Fate(model, job, ends_at)
        for _ in range(more):
            insort(free, ends_at)
        cold.take(model, more, job=job.id)
        return Fate(model, job, ends_at, Promise(job.id, more, count - more, free_at=ends_at))

    def _rest(self, model: str, job: PoolJob) -> Fate:
        pool, free = self._pools[model], self._free[model]
        if len(free) < job.least:
            begins_at = self._now + pool.cold_s
        else:
            begins_at = free[job.least - 1]
        ends_at = math.inf if job.measures else begins_at + job.run_s[job.least - 1]
        if len(free) >= job.least:
            _reserve(free, job.least, ends_at)
        return Fate(model, job, ends_at, helped=False)


def _named(keys: Iterator[Key], model: str) -> Iterator[tuple[Key, str]]:
    for key in keys:
        yield key, model


def _free_at(pool: Pool, *, now: float, idle: int) -> list[float]:
    """When each warm replica is free, in order, and each that is promised. Those that are idle are free now; one whose
    job runs longer than it should is free any moment, but not yet."""
    soon = math.nextafter(now, math.inf)
    promised = (each.free_at for each in pool.promised for _ in range(each.replicas + each.beside))
    return [now] * idle + sorted(max(soon, at) for at in chain(pool.busy, promised))


def _slot(free: list[float], job: PoolJob) -> int:
    """DelaySchedulable: the fewest replicas with which a job is in time on those that are free by then; 0 if none."""
    deadline_at = job.deadline_at
    for count, (begins_at, seconds) in enumerate(zip(free, job.run_s, strict=False), start=1):
        if begins_at + seconds <= deadline_at:
            return count
    return 0


def _reserve(free: list[float], count: int, until: float) -> None:
    """The replicas that are free first are one job's until then."""
    del free[:count]
    place = bisect_right(free, until)
    free[place:place] = [until] * count


def _soonest(free: list[float], job: PoolJob, *, warm_at: float, there: int) -> float:
    """When a job that cannot be helped would be done, were the others ahead of it done in time."""
    ends = [begins_at + seconds for begins_at, seconds in zip(free, job.run_s, strict=False)]
    warmed = min(there, len(job.run_s)) or len(job.run_s)
    return min(*ends, warm_at + job.run_s[warmed - 1]) if ends else warm_at + job.run_s[warmed - 1]
