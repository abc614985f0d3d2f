"""Assign devices to jobs with deadlines by predicted run time: PromptTuner's Workload Scheduler (§4.4).

Jobs of one model share its *warm pool*: the devices with that model. All models share the *cold pool*: empty devices.
`allot` (Algorithm 1) chooses the waiting jobs that start now, and the number of idle warm replicas of each job.
`DevicePlanner` (Algorithm 2, with DelaySchedulable) chooses the devices to warm. No device is warmed for a job that can
wait for devices of running jobs.

Differences from the printed algorithms:

- A deadline is a point in time. The paper's `T_slo` is a duration that does not shrink while a job waits.
- Algorithm 1 adds devices while `A <= R`, up to R + 1. Here R and the maximum of the job are the limits.
- Algorithm 1 never starts a job that can no longer meet its deadline. Here late jobs run last, on their fewest
  replicas.
- Algorithm 2 loops while `T_slo < T_cold`, so it ends immediately or never. Here it adds devices while the deadline is
  missed and cold devices remain.
- Algorithm 2 writes durations (line 19) but reads points in time (line 26). Here loading devices are free at now +
  T_cold + T(A). Loading devices, and the idle devices of a job, are reserved until the job starts (`Promise`).
- In DelaySchedulable, `k` may be all devices of the pool, and the job uses all k devices until it ends.
- Idle devices are used before cold devices are warmed. Delayed jobs are planned again in each round.
- The first job of a model measures run times, so it gets its fewest replicas immediately.

The *need* of a job is the smallest number of replicas that meets its deadline if it starts now. The need never falls.
So `JobQueue` keeps one list of jobs for each need, sorted by deadline, and a heap of latest start times.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Protocol

import msgspec

from stoker.protocol.ids import DeviceId, LibraryId, PilotId

JobKey = tuple[int, float, int]  # Class of a job, deadline (for `NO_DEADLINE` the negative priority), id
ReplicaPlace = tuple[PilotId, tuple[DeviceId, ...]]  # Pilot and devices of a replica

HOPEFUL, LATE, NO_DEADLINE = 0, 1, 2  # Classes of jobs: can meet the deadline, cannot meet it, have none
BEFORE_ALL_JOBS: JobKey = (-1, 0.0, 0)  # Sort key that precedes all jobs

_EARLY_S = 1e-6  # Because of rounding, a job's need is updated this many seconds before its latest start
_FEW_JOBS = 8  # Up to this many new jobs are inserted into a sorted list one by one; for more, the list is sorted again


class PoolJob(msgspec.Struct, frozen=True, gc=False):
    """A waiting job. `run_s[a - 1]`: maximum run time in seconds on `a` replicas. `measures`: True if the run times are
    unknown, so that this job measures them.
    """

    id: int
    deadline_at: float
    run_s: tuple[float, ...]
    least: int = 1
    measures: bool = False
    priority: int = 0

    def fewest_replicas(self, *, begins_at: float, most: int) -> int:
        """Return the fewest replicas, up to `most`, that meet the deadline; 0 if none do."""
        for count, seconds in enumerate(self.run_s[:most], start=1):
            if begins_at + seconds <= self.deadline_at:
                return count
        return 0

    def will_miss_deadline(self, now: float) -> bool:
        return now + self.run_s[-1] > self.deadline_at


class JobQueue:
    """The waiting jobs of one pool, sorted by `JobKey`. The argument `now` must not decrease from call to call."""

    __slots__ = ("_due", "_needs", "_turns", "jobs", "keys", "keys_by_need", "keys_without_deadline", "late_keys")

    def __init__(self) -> None:
        self.jobs: dict[int, PoolJob] = {}
        self.keys_by_need: dict[int, list[JobKey]] = {}  # Hopeful jobs by the number of replicas that they need
        self.late_keys: list[JobKey] = []
        self.keys_without_deadline: list[JobKey] = []
        self.keys: dict[int, JobKey] = {}
        self._needs: dict[int, int] = {}
        self._due: dict[int, float] = {}  # By job: time from which it may need more replicas
        self._turns: list[tuple[float, int]] = []  # Heap of (time, job). Entries that differ from `_due` are outdated

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def has_hopeful_jobs(self) -> bool:
        return any(self.keys_by_need.values())

    def put(self, jobs: Iterable[PoolJob], *, now: float) -> None:
        fresh: dict[int, list[JobKey]] = {}
        turns: list[tuple[float, int]] = []
        for job in jobs:
            id, deadline_at = job.id, job.deadline_at
            if id in self.jobs:
                self.remove(id)
            self.jobs[id] = job
            if not deadline_at:
                need, key = -1, (NO_DEADLINE, -float(job.priority), id)
            else:
                run_s = job.run_s
                need = 1 if now + run_s[0] <= deadline_at else job.fewest_replicas(begins_at=now, most=len(run_s))
                key = (HOPEFUL if need else LATE, deadline_at, id)
                if need:
                    self._due[id] = at = deadline_at - run_s[need - 1] - _EARLY_S
                    turns.append((at, id))
            self.keys[id], self._needs[id] = key, need
            fresh.setdefault(need, []).append(key)
        if len(turns) <= _FEW_JOBS:
            for turn in turns:
                heapq.heappush(self._turns, turn)
        else:
            self._turns = [(at, id) for at, id in self._turns if self._due.get(id) == at] + turns
            heapq.heapify(self._turns)
        for need, keys in fresh.items():
            row = self._row(need)
            if len(keys) <= _FEW_JOBS:
                for key in keys:
                    insort(row, key)
            else:
                row += keys
                row.sort()

    def remove(self, id: int) -> None:
        if self.jobs.pop(id, None) is None:
            return
        row, key = self._row(self._needs.pop(id)), self.keys.pop(id)
        del row[bisect_left(row, key)]
        self._due.pop(id, None)

    def update_needs(self, now: float) -> bool:
        """Update how many replicas jobs need to meet their deadlines. Return True if any number changed."""
        moved = False
        turns = self._turns
        while turns and turns[0][0] <= now:
            at, id = heapq.heappop(turns)
            if self._due.get(id) != at:
                continue
            job, need, key = self.jobs[id], self._needs[id], self.keys[id]
            grown = job.fewest_replicas(begins_at=now, most=len(job.run_s))
            if grown:
                self._due[id] = at = max(now + _EARLY_S, job.deadline_at - job.run_s[grown - 1] - _EARLY_S)
                heapq.heappush(turns, (at, id))
            else:
                del self._due[id]
            if grown == need:
                continue
            moved = True
            row = self._row(need)
            del row[bisect_left(row, key)]
            key = (HOPEFUL if grown else LATE, job.deadline_at, id)
            self.keys[id], self._needs[id] = key, grown
            insort(self._row(grown), key)
        return moved

    def can_meet_deadline(self, id: int) -> bool:
        return self._needs.get(id, 0) > 0

    def needed_replicas(self, id: int) -> int:
        return max(0, self._needs.get(id, 0))

    def find_first(self, *, after: JobKey, most: int, but: Iterable[int] = ()) -> JobKey | None:
        """Return the key of the first job after `after` that needs up to `most` replicas and is not in `but`."""
        found: JobKey | None = None
        for need, row in self.keys_by_need.items():
            if need > most:
                continue
            place = bisect_right(row, after)
            while place < len(row) and row[place][2] in but:
                place += 1
            if place < len(row) and (found is None or row[place] < found):
                found = row[place]
        return found

    def iter_keys_after(self, after: JobKey) -> Iterator[JobKey]:
        rows = [
            row
            for row in (*self.keys_by_need.values(), self.late_keys, self.keys_without_deadline)
            if row and row[-1] > after
        ]
        return heapq.merge(*(map(row.__getitem__, range(bisect_right(row, after), len(row))) for row in rows))

    def _row(self, need: int) -> list[JobKey]:
        if need > 0:
            return self.keys_by_need.setdefault(need, [])
        return self.keys_without_deadline if need else self.late_keys


class Promise(msgspec.Struct):
    """Replicas that were ordered for a job. `loaded`: number of them that are loaded. `reserved_idle`: number of other,
    idle replicas that are reserved for the job.
    """

    job: int
    replicas: int
    reserved_idle: int = 0
    loaded: int = 0
    free_at: float = 0.0
    places: list[ReplicaPlace] = []
    lost: list[ReplicaPlace] = []
    loading: set[LibraryId] = set()

    @property
    def reserved_count(self) -> int:
        return self.reserved_idle + self.loaded


class Pool(msgspec.Struct, frozen=True):
    """A model's warm replicas. `idle`: number of idle replicas. `busy`: time at which each busy replica becomes free.
    `cold_s`: seconds to load a replica. `held`: idle replicas that each job holds (only in an ablation).
    """

    idle: int
    busy: tuple[float, ...] = ()
    promised: tuple[Promise, ...] = ()
    cold_s: float = 0.0
    held: Mapping[int, int] = {}

    @property
    def unreserved_idle(self) -> int:
        return max(0, self.idle - sum(promise.reserved_count for promise in self.promised) - sum(self.held.values()))


_Take = Callable[[PoolJob, int], bool]


def allot(line: JobQueue, pool: Pool, *, now: float, take: _Take = lambda *_: True) -> dict[int, int]:
    """Algorithm 1: return the number of replicas of each job that starts now. A job that `take` refuses waits."""
    line.update_needs(now)
    kept = {each.job: min(each.reserved_count, pool.idle) for each in pool.promised if each.job in line.jobs}
    kept.update({id: min(count, pool.idle) for id, count in pool.held.items() if id in line.jobs})
    idle = max(0, pool.idle - sum(kept.values()))
    given: dict[int, int] = {}
    done, passed = set(kept), BEFORE_ALL_JOBS
    while key := _next_job(line, kept, after=passed, idle=idle, done=done):
        passed, job, mine = key, line.jobs[key[2]], kept.get(key[2], 0)
        count = job.fewest_replicas(begins_at=now, most=idle + mine)
        if not count:
            continue
        done.add(job.id)
        kept.pop(job.id, None)
        if not take(job, count):
            continue
        given[job.id] = count
        idle += mine - count
        if mine > count:  # an earlier job may need the returned replicas
            passed = BEFORE_ALL_JOBS
    if (
        idle
        and (line.late_keys or line.keys_without_deadline)
        and not _needs_idle_replicas(line, pool, done, idle=idle, now=now)
    ):
        _start_late_jobs(line, pool, given, idle=idle, take=take)
    return given


def _next_job(line: JobQueue, kept: Mapping[int, int], *, after: JobKey, idle: int, done: set[int]) -> JobKey | None:
    found = line.find_first(after=after, most=idle, but=done) if idle else None
    for id in kept:
        if line.can_meet_deadline(id) and after < (key := line.keys[id]) and (found is None or key < found):
            found = key
    return found


def _needs_idle_replicas(line: JobQueue, pool: Pool, done: set[int], *, idle: int, now: float) -> bool:
    free = _free_at(pool, now=now, idle=idle)
    for row in line.keys_by_need.values():
        for _, _, id in reversed(row):  # jobs with the latest deadlines are most likely to wait
            if id not in done and _min_replicas_for_deadline(free, line.jobs[id]):
                return True
    return False


def _start_late_jobs(line: JobQueue, pool: Pool, given: dict[int, int], *, idle: int, take: _Take) -> None:
    """Give idle replicas to late jobs, then to jobs without deadlines. Later jobs wait if a job must wait."""
    for _, _, id in chain(line.late_keys, line.keys_without_deadline):
        job = line.jobs[id]
        if job.least <= idle:
            if take(job, job.least):
                given[id] = job.least
                idle -= job.least
        elif job.least <= pool.idle + len(pool.busy):
            return
        if not idle:
            return


class ColdPool(Protocol):
    def count_loadable(self, model: str, *, most: int) -> int: ...  # How many replicas, up to `most`, fit cold devices

    def reserve_devices(self, model: str, count: int, *, job: int) -> None: ...


class PlannedJob(msgspec.Struct, frozen=True):
    """The decision of `DevicePlanner` about a job. `has_devices_in_time`: True if enough devices are ordered for the
    job, or become free before its latest start.
    """

    model: str
    job: PoolJob
    ends_at: float
    promise: Promise | None = None
    has_devices_in_time: bool = True


class DevicePlanner:
    """Algorithm 2 over all jobs, in order of `JobKey`. `delay`: jobs may wait for devices that other jobs use."""

    def __init__(self, *, delay: bool = True) -> None:
        self.delay = delay
        self._at = BEFORE_ALL_JOBS
        self._now = 0.0
        self._pools: dict[str, Pool] = {}
        self._free: dict[str, list[float]] = {}
        self._served: dict[int, Promise] = {}
        self.is_unfinished = False

    def start_round(self, pools: Mapping[str, Pool], *, now: float) -> None:
        self._at, self._now, self.is_unfinished = BEFORE_ALL_JOBS, now, True
        self._pools = dict(pools)
        self._free = {model: _free_at(pool, now=now, idle=pool.unreserved_idle) for model, pool in pools.items()}
        self._served = {promise.job: promise for pool in pools.values() for promise in pool.promised}

    def plan_next_jobs(self, lines: Mapping[str, JobQueue], cold: ColdPool, *, most_jobs: int) -> list[PlannedJob]:
        """Decide about the next `most_jobs` jobs. After the last job, set `is_unfinished` to False."""
        fates: list[PlannedJob] = []
        known = ((model, line) for model, line in lines.items() if line and model in self._pools)
        remaining = heapq.merge(*(zip(line.iter_keys_after(self._at), repeat(model)) for model, line in known))
        for key, model in remaining:
            if len(fates) >= most_jobs:
                return fates
            self._at, job = key, lines[model].jobs[key[2]]
            is_hopeful = key[0] == HOPEFUL
            fates.append(self._plan_hopeful_job(model, job, cold) if is_hopeful else self._plan_late_job(model, job))
        self.is_unfinished = False
        return fates

    def _plan_hopeful_job(self, model: str, job: PoolJob, cold: ColdPool) -> PlannedJob:
        pool, free, now = self._pools[model], self._free[model], self._now
        promise = self._served.get(job.id)
        if promise is not None:
            return PlannedJob(model, job, max(promise.free_at, now))
        held = pool.held.get(job.id, 0)
        if not held:
            return self._plan_waiting_job(model, job, cold)
        idle = bisect_right(free, now)
        free[:0] = [now] * held
        found = self._plan_waiting_job(model, job, cold)
        del free[: max(0, bisect_right(free, now) - idle)]  # other jobs must not use the held replicas that are left
        return found

    def _plan_waiting_job(self, model: str, job: PoolJob, cold: ColdPool) -> PlannedJob:
        pool, free, now = self._pools[model], self._free[model], self._now
        slot = _min_replicas_for_deadline(free, job) if self.delay and not job.measures else 0
        if slot:
            ends_at = free[slot - 1] + job.run_s[slot - 1]
            _reserve_replicas(free, slot, ends_at)
            return PlannedJob(model, job, ends_at)
        idle = bisect_right(free, now)
        warm_at = now + pool.cold_s
        there = idle + cold.count_loadable(model, most=max(0, len(job.run_s) - idle))
        count = job.fewest_replicas(begins_at=warm_at, most=there)
        if not count:
            soonest = math.inf if job.measures else _earliest_end(free, job, warm_at=warm_at, there=there)
            return PlannedJob(model, job, soonest, has_devices_in_time=False)
        ends_at = math.inf if job.measures else warm_at + job.run_s[count - 1]
        more = max(0, count - idle)
        _reserve_replicas(free, count - more, ends_at)
        if not more:  # the job may start immediately
            return PlannedJob(model, job, ends_at)
        for _ in range(more):
            insort(free, ends_at)
        cold.reserve_devices(model, more, job=job.id)
        return PlannedJob(model, job, ends_at, Promise(job.id, more, count - more, free_at=ends_at))

    def _plan_late_job(self, model: str, job: PoolJob) -> PlannedJob:
        pool, free = self._pools[model], self._free[model]
        begins_at = free[job.least - 1] if len(free) >= job.least else self._now + pool.cold_s
        ends_at = math.inf if job.measures else begins_at + job.run_s[job.least - 1]
        if len(free) >= job.least:
            _reserve_replicas(free, job.least, ends_at)
        return PlannedJob(model, job, ends_at, has_devices_in_time=False)


def _free_at(pool: Pool, *, now: float, idle: int) -> list[float]:
    """Return the sorted times at which replicas become free. Overdue replicas count as free just after `now`."""
    soon = math.nextafter(now, math.inf)
    promised = (each.free_at for each in pool.promised for _ in range(each.replicas + each.reserved_idle))
    return [now] * idle + sorted(max(soon, at) for at in chain(pool.busy, promised))


def _min_replicas_for_deadline(free: list[float], job: PoolJob) -> int:
    """DelaySchedulable: return the fewest replicas that are free in time for a job; 0 if none."""
    deadline_at = job.deadline_at
    for count, (begins_at, seconds) in enumerate(zip(free, job.run_s, strict=False), start=1):
        if begins_at + seconds <= deadline_at:
            return count
    return 0


def _reserve_replicas(free: list[float], count: int, until: float) -> None:
    del free[:count]
    place = bisect_right(free, until)
    free[place:place] = [until] * count


def _earliest_end(free: list[float], job: PoolJob, *, warm_at: float, there: int) -> float:
    ends = [begins_at + seconds for begins_at, seconds in zip(free, job.run_s, strict=False)]
    warmed = min(there, len(job.run_s)) or len(job.run_s)
    return min([*ends, warm_at + job.run_s[warmed - 1]])
