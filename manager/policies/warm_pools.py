"""How many devices each job with a deadline gets: PromptTuner's Workload Scheduler (§4.4), as arithmetic.

Jobs of one model share its *warm pool*: devices on which that model is loaded. All models share the *cold pool*:
devices that hold nothing. A job runs on several replicas at once and is done sooner. Two questions are asked in every
round, and both are answered here from times alone; `stoker.manager.policies` turns the answers into actions.

- `allot` (Algorithm 1): which waiting jobs start now on devices that are warm and idle, and on how many each?
- `order` (Algorithm 2, with DelaySchedulable): which devices are to be warmed, for which jobs? A job that can wait for
  devices which running jobs will give back gets none.

Where we differ from the printed algorithms, and why:

- A deadline is a point in time. The paper's `T_slo` is a duration that never gets shorter while a job waits; jobs are
  sorted by deadline, and what is left until then is compared.
- Algorithm 1 grows while `A <= R`, and so gives up to R + 1 devices, and one where there are none. Here never more than
  there are. A job has a largest number of replicas of its own; more of them do not help it.
- Jobs that can make their deadline no more get nothing in Algorithm 1, for ever. Here they run last, on devices that
  are left over and that no delayed job counts on, one replica each.
- Algorithm 2's loop runs while `T_slo < T_cold`, which ends at once or never. It grows while the deadline is missed,
  the load alone would leave time, and there are cold devices; all models take from one count of these.
- Line 19 notes durations where line 26 reads points in time. Devices that are being warmed are noted as free again at
  now + T_cold + T(A). They belong to the job that they were ordered for (`Promise`), and so do the idle ones that
  are to run beside them, in all rounds until it starts: each would order them anew otherwise.
- DelaySchedulable: `k` may be all devices of the pool; nobody gets a device before now; and all k devices are taken
  until the job is done, for it needs them together.
- Only what idle devices do not cover is ordered.
- A delay binds nobody. Reservations are made anew in each round, by deadline, and a job whose slack has fallen under
  the time that warming takes is no longer delayed: it could not be helped any more if what it waits for came late.

Times are in seconds, on the manager's clock. A replica may be several devices: callers count replicas.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

import msgspec


class Job(msgspec.Struct, frozen=True):
    """A job that waits. `run_s[a - 1]`: an upper bound of its time on `a` replicas, meeting included, not longer for
    more of them. `deadline_at`: 0 = none, then it runs when nobody else wants to."""

    id: int
    deadline_at: float
    run_s: tuple[float, ...]

    def fewest(self, *, begins_at: float, most: int) -> int:
        """The least number of replicas, of so many at most, with which it is in time; 0 if there is none."""
        for count, seconds in enumerate(self.run_s[:most], start=1):
            if begins_at + seconds <= self.deadline_at:
                return count
        return 0

    def is_lost(self, now: float) -> bool:
        """Whether it is late however many replicas it gets, were they warm."""
        return now + self.run_s[-1] > self.deadline_at


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
    """A model's pool as a round finds it. `idle`: warm replicas that nobody uses, those that are kept for promises
    among them. `busy`: when each of the others will be free, as far as is known. `cold_s`: what warming one takes."""

    idle: int
    busy: tuple[float, ...] = ()
    promised: tuple[Promise, ...] = ()
    cold_s: float = 0.0


def by_deadline(jobs: Iterable[Job]) -> list[Job]:
    """Those with a deadline first, the nearest before all; then the others, oldest first."""
    return sorted(jobs, key=lambda job: (not job.deadline_at, job.deadline_at, job.id))


def allot(jobs: Sequence[Job], pool: Pool, *, now: float) -> dict[int, int]:
    """Replicas for jobs that start now, by job. `jobs` are all that wait for this pool. What is kept for a job that
    starts without it, or that is not among them any more, is anybody's."""
    promised = {promise.job: promise for promise in pool.promised}
    line = by_deadline(jobs)
    kept = {job.id: min(promised[job.id].kept, pool.idle) for job in line if job.id in promised}
    idle = max(0, pool.idle - sum(kept.values()))
    given: dict[int, int] = {}
    waits: list[Job] = []
    for job in line:
        mine = kept.get(job.id, 0)
        count = job.fewest(begins_at=now, most=idle + mine)
        if count:
            given[job.id] = count
            idle += mine - count
        else:
            waits.append(job)
    spare = _spare(waits, pool, idle=idle, now=now) if idle else 0
    for job in waits:
        if spare and (job.is_lost(now) or not job.deadline_at):
            given[job.id] = 1
            spare -= 1
    return given


def _spare(waits: Sequence[Job], pool: Pool, *, idle: int, now: float) -> int:
    """Idle replicas that no delayed job counts on."""
    free = _free_at(pool, now=now, idle=idle)
    for job in waits:
        if job.deadline_at and not job.is_lost(now):
            _delay(free, job, slack_s=0.0, now=now)
    return sum(at <= now for at in free)


def order(
    jobs: Mapping[str, Sequence[Job]], pools: Mapping[str, Pool], *, cold: int, now: float, delay: bool = True
) -> dict[str, dict[int, Promise]]:
    """Replicas to warm, by model and job. `jobs`: those that still wait when `allot` has given what it could, and
    `pools` what is idle then. `cold`: replicas that the cold pool can give to all models together. `delay`: without it
    no job waits for devices of others (an ablation)."""
    served = {promise.job for pool in pools.values() for promise in pool.promised}
    free = {}
    for model, pool in pools.items():
        unkept = max(0, pool.idle - sum(promise.kept for promise in pool.promised))
        free[model] = _free_at(pool, now=now, idle=unkept)
    line = sorted(
        ((job, model) for model, waiting in jobs.items() for job in waiting if job.deadline_at),
        key=lambda entry: (entry[0].deadline_at, entry[0].id),
    )
    orders: dict[str, dict[int, Promise]] = {}
    for job, model in line:
        if job.id in served or job.is_lost(now):
            continue
        pool, at = pools[model], free[model]
        if delay and _delay(at, job, slack_s=pool.cold_s, now=now):
            continue
        idle = sum(moment <= now for moment in at)
        warm_at = now + pool.cold_s
        count = job.fewest(begins_at=warm_at, most=idle + cold)
        if not count:
            continue
        beside = min(idle, count)
        more = count - beside
        del at[:beside]
        free_at = warm_at + job.run_s[count - 1]
        for _ in range(count):
            insort(at, free_at)
        if more:
            cold -= more
            orders.setdefault(model, {})[job.id] = Promise(job.id, more, beside, free_at=free_at)
    return orders


def _free_at(pool: Pool, *, now: float, idle: int) -> list[float]:
    """When each warm replica is free, in order, and each that is promised. Those that are idle are free now; one whose
    job runs longer than it should is free any moment, but not yet."""
    soon = math.nextafter(now, math.inf)
    promised = (each.free_at for each in pool.promised for _ in range(each.replicas + each.beside))
    return sorted([now] * idle + [max(soon, at) for at in (*pool.busy, *promised)])


def _delay(free: list[float], job: Job, *, slack_s: float, now: float) -> bool:
    """DelaySchedulable: whether a job is in time on replicas that are free by then; if so they are its own until it is
    done. A job that would begin so late that nobody could warm others for it any more is not delayed."""
    for count, seconds in enumerate(job.run_s[: len(free)], start=1):
        begins_at = free[count - 1]
        if begins_at + seconds > job.deadline_at:
            continue
        if begins_at > now and job.deadline_at - now - job.run_s[-1] < slack_s:
            return False
        ends_at = begins_at + seconds
        del free[:count]
        for _ in range(count):
            insort(free, ends_at)
        return True
    return False
