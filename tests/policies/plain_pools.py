"""Reference implementation of PromptTuner's Algorithms 1 and 2 over whole lists."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from stoker.manager.policies.prompt_tuner.scheduling import Pool, PoolJob, Promise


def by_deadline(jobs: Iterable[PoolJob]) -> list[PoolJob]:
    return sorted(jobs, key=lambda job: (not job.deadline_at, job.deadline_at or -job.priority, job.id))


def allot(jobs: Sequence[PoolJob], pool: Pool, *, now: float) -> dict[int, int]:
    promised = {promise.job: promise for promise in pool.promised}
    line = by_deadline(jobs)
    kept = {job.id: min(promised[job.id].reserved_count, pool.idle) for job in line if job.id in promised}
    idle = max(0, pool.idle - sum(kept.values()))
    given: dict[int, int] = {}
    again = True
    while again:
        again = False
        for job in line:
            mine = kept.get(job.id, 0)
            count = job.fewest_replicas(begins_at=now, most=idle + mine) if job.id not in given else 0
            if count:
                given[job.id] = count
                kept.pop(job.id, None)
                idle += mine - count
                if mine > count:  # start again: a job with a nearer deadline may need the freed replica
                    again = True
                    break
    waits = [job for job in line if job.id not in given]
    spare = _spare([job for job in waits if job.id not in promised], pool, idle=idle, now=now)
    for job in waits:
        if not spare:
            break
        if job.will_miss_deadline(now) or not job.deadline_at:
            if job.least <= spare:
                given[job.id] = job.least
                spare -= job.least
            elif job.least <= pool.idle + len(pool.busy):
                break
    return given


def _spare(waits: Sequence[PoolJob], pool: Pool, *, idle: int, now: float) -> int:
    free = _free_at(pool, now=now, idle=idle)
    for job in waits:
        if job.deadline_at and not job.will_miss_deadline(now):
            _delay(free, job)
    return sum(at <= now for at in free)


def order(
    jobs: Mapping[str, Sequence[PoolJob]], pools: Mapping[str, Pool], *, cold: int, now: float, delay: bool = True
) -> dict[str, dict[int, Promise]]:
    served = {promise.job for pool in pools.values() for promise in pool.promised}
    free = {}
    for model, pool in pools.items():
        unkept = max(0, pool.idle - sum(promise.reserved_count for promise in pool.promised))
        free[model] = _free_at(pool, now=now, idle=unkept)
    line = sorted(
        ((job, model) for model, waiting in jobs.items() for job in waiting if job.deadline_at),
        key=lambda entry: (entry[0].deadline_at, entry[0].id),
    )
    orders: dict[str, dict[int, Promise]] = {}
    for job, model in line:
        if job.id in served or job.will_miss_deadline(now):
            continue
        pool, at = pools[model], free[model]
        if delay and not job.measures and _delay(at, job):
            continue
        idle = sum(moment <= now for moment in at)
        warm_at = now + pool.cold_s
        count = job.fewest_replicas(begins_at=warm_at, most=idle + cold)
        if not count:
            continue
        beside = min(idle, count)
        more = count - beside
        del at[:beside]
        free_at = math.inf if job.measures else warm_at + job.run_s[count - 1]
        for _ in range(count):
            insort(at, free_at)
        if more:
            cold -= more
            orders.setdefault(model, {})[job.id] = Promise(job.id, more, beside, free_at=free_at)
    return orders


def _free_at(pool: Pool, *, now: float, idle: int) -> list[float]:
    soon = math.nextafter(now, math.inf)
    promised = (each.free_at for each in pool.promised for _ in range(each.replicas + each.reserved_idle))
    return sorted([now] * idle + [max(soon, at) for at in (*pool.busy, *promised)])


def _delay(free: list[float], job: PoolJob) -> bool:
    for count, seconds in enumerate(job.run_s[: len(free)], start=1):
        ends_at = free[count - 1] + seconds
        if ends_at <= job.deadline_at:
            del free[:count]
            for _ in range(count):
                insort(free, ends_at)
            return True
    return False
