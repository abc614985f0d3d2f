"""Test PromptTuner's two algorithms with known answers, reference algorithms (`plain_pools`) and random events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from policies import plain_pools

from stoker.manager.policies.prompt_tuner import scheduling
from stoker.manager.policies.prompt_tuner.scheduling import (
    BEFORE_ALL_JOBS,
    HOPEFUL,
    DevicePlanner,
    JobQueue,
    PlannedJob,
    Pool,
    PoolJob,
    Promise,
)


class Devices:
    """A cold pool shared by all models."""

    def __init__(self, count: int) -> None:
        self.left = count

    def count_loadable(self, model: str, *, most: int) -> int:
        return min(self.left, most)

    def reserve_devices(self, model: str, count: int, *, job: int) -> None:
        assert 0 < count <= self.left
        self.left -= count


def line_of(jobs: Iterable[PoolJob], *, now: float = 0.0) -> JobQueue:
    line = JobQueue()
    line.put(jobs, now=now)
    return line


def quick_allot(jobs: Sequence[PoolJob], pool: Pool, *, now: float) -> dict[int, int]:
    return scheduling.allot(line_of(jobs), pool, now=now)


def walk(
    jobs: Mapping[str, Sequence[PoolJob]], pools: Mapping[str, Pool], *, cold: int, now: float, delay: bool = True,
    looks: int = 10**6,
) -> list[PlannedJob]:  # fmt: skip
    lines = {model: line_of(waiting) for model, waiting in jobs.items()}
    for line in lines.values():
        line.update_needs(now)
    walk, devices, fates = DevicePlanner(delay=delay), Devices(cold), list[PlannedJob]()
    walk.start_round(pools, now=now)
    while walk.is_unfinished:
        fates += walk.plan_next_jobs(lines, devices, most_jobs=looks)
    return fates


def quick_order(
    jobs: Mapping[str, Sequence[PoolJob]], pools: Mapping[str, Pool], **how: Any
) -> dict[str, dict[int, Promise]]:
    found: dict[str, dict[int, Promise]] = {}
    for fate in walk(jobs, pools, **how):
        if fate.promise is not None:
            found.setdefault(fate.model, {})[fate.job.id] = fate.promise
    return found


Allot = Callable[..., dict[int, int]]
Order = Callable[..., dict[str, dict[int, Promise]]]


@pytest.fixture(params=["plain", "quick"])
def allot(request: pytest.FixtureRequest) -> Allot:
    return plain_pools.allot if request.param == "plain" else quick_allot


@pytest.fixture(params=["plain", "quick"])
def order(request: pytest.FixtureRequest) -> Order:
    return plain_pools.order if request.param == "plain" else quick_order


def job(id: int, deadline_at: float, alone_s: float, *, most: int = 4, meeting_s: float = 2.0) -> PoolJob:
    """Return a job of `alone_s` s on one replica; several replicas divide the time and connect in `meeting_s`."""
    shared = (alone_s / count + meeting_s for count in range(2, most + 1))
    return PoolJob(id, deadline_at, tuple(accumulate((alone_s, *shared), min)))


def replicas(orders: dict[str, dict[int, Promise]]) -> dict[int, int]:
    return {job: promise.replicas for ordered in orders.values() for job, promise in ordered.items()}


def test_jobs_get_the_fewest_devices_in_order_of_their_deadlines(allot: Allot) -> None:
    jobs = [job(1, 200.0, 100.0), job(2, 60.0, 100.0), job(3, 30.0, 100.0)]
    assert allot(jobs, Pool(idle=7), now=0.0) == {3: 4, 2: 2, 1: 1}
    assert allot(jobs, Pool(idle=6), now=0.0) == {3: 4, 2: 2}


def test_hopelessly_late_job_gets_only_devices_no_other_job_needs(allot: Allot) -> None:
    lost, hopeful = job(1, 10.0, 100.0), job(2, 300.0, 100.0)
    assert allot([lost, hopeful], Pool(idle=1), now=0.0) == {2: 1}
    assert allot([lost, hopeful], Pool(idle=2), now=0.0) == {1: 1, 2: 1}
    assert allot([PoolJob(1, 0.0, (100.0,)), hopeful], Pool(idle=2), now=0.0) == {1: 1, 2: 1}


def test_delayed_job_keeps_the_idle_device_that_it_needs_later(allot: Allot) -> None:
    lost, delayed = job(1, 10.0, 100.0), job(2, 60.0, 100.0)
    assert allot([lost, delayed], Pool(idle=1, busy=(5.0,)), now=0.0) == {}


def test_job_waits_for_busy_devices_in_time_or_orders_cold_devices(order: Order) -> None:
    pool = Pool(idle=0, busy=(40.0,), cold_s=20.0)
    assert order({"a": [job(1, 200.0, 100.0)]}, {"a": pool}, cold=8, now=0.0) == {}
    [ordered] = order({"a": [job(1, 130.0, 100.0)]}, {"a": pool}, cold=8, now=0.0)["a"].values()
    assert ordered == Promise(1, 1, free_at=120.0)
    [ordered] = order({"a": [job(1, 200.0, 100.0)]}, {"a": pool}, cold=8, now=0.0, delay=False)["a"].values()
    assert ordered == Promise(1, 1, free_at=120.0)


def test_load_time_counts_and_idle_devices_are_used_first(order: Order) -> None:
    pools = {"a": Pool(idle=1, cold_s=20.0)}
    [ordered] = order({"a": [job(1, 70.0, 100.0)]}, pools, cold=8, now=0.0)["a"].values()
    assert (ordered.replicas, ordered.reserved_idle) == (2, 1)
    assert ordered.free_at == pytest.approx(20.0 + 100.0 / 3 + 2.0)
    assert order({"a": [job(1, 15.0, 100.0)]}, pools, cold=8, now=0.0) == {}


def test_cold_pool_is_shared_by_all_models(order: Order) -> None:
    jobs = {"a": [job(1, 80.0, 100.0)], "b": [job(2, 60.0, 100.0)]}
    pools = {"a": Pool(idle=0, cold_s=20.0), "b": Pool(idle=0, cold_s=20.0)}
    assert replicas(order(jobs, pools, cold=3, now=0.0)) == {2: 3}
    assert replicas(order(jobs, pools, cold=5, now=0.0)) == {2: 3, 1: 2}


def test_loading_replicas_are_not_ordered_again_and_keep_their_job(allot: Allot, order: Order) -> None:
    waiting = job(1, 70.0, 100.0)
    coming = Pool(idle=1, promised=(Promise(1, 2, reserved_idle=1),), cold_s=20.0)
    assert order({"a": [waiting]}, {"a": coming}, cold=8, now=1.0) == {}
    assert allot([waiting, job(2, 400.0, 100.0)], coming, now=1.0) == {}
    come = Pool(idle=3, promised=(Promise(1, 2, reserved_idle=1, loaded=2),), cold_s=20.0)
    assert allot([waiting, job(2, 400.0, 100.0)], come, now=20.0) == {1: 3}


def test_jobs_do_not_wait_for_devices_of_a_measuring_job(order: Order, allot: Allot) -> None:
    first, second = (PoolJob(id, 500.0, (math.inf, 0.0, 0.0), 2, True) for id in (1, 2))
    assert allot([first, second], Pool(idle=3), now=0.0) == {1: 2}
    pool = Pool(idle=1, busy=(math.inf, math.inf), cold_s=20.0)
    found = order({"a": [second]}, {"a": pool}, cold=8, now=0.0)
    assert found == {"a": {2: Promise(2, 1, 1, free_at=math.inf)}}
    assert order({"a": [second, job(3, 1000.0, 100.0)]}, {"a": pool}, cold=8, now=0.0)["a"][3].replicas == 1


def test_surplus_replicas_of_a_promised_job_go_to_skipped_jobs(allot: Allot) -> None:
    pool = Pool(idle=3, promised=(Promise(2, 1, reserved_idle=2, loaded=0),))
    assert allot([job(1, 60.0, 100.0), job(2, 150.0, 100.0)], pool, now=0.0) == {2: 1, 1: 2}


def test_best_effort_gangs_are_not_overtaken_by_smaller_gangs(allot: Allot) -> None:
    pair, single = PoolJob(1, 0.0, (math.inf, 60.0), 2), PoolJob(2, 0.0, (100.0,))
    assert allot([pair, single], Pool(idle=2), now=0.0) == {1: 2}
    assert allot([pair, single], Pool(idle=1, busy=(9.0,)), now=0.0) == {}
    assert allot([pair, single], Pool(idle=1), now=0.0) == {2: 1}, "the pool will never have two"


def test_job_keeps_the_devices_that_it_already_holds() -> None:
    line = line_of([job(1, 60.0, 100.0), job(2, 400.0, 100.0)])
    assert scheduling.allot(line, Pool(idle=1, held={1: 1}), now=0.0) == {}
    assert scheduling.allot(line, Pool(idle=2, held={1: 2}), now=0.0) == {1: 2}
    [one, two] = walk(
        {"a": [job(1, 60.0, 100.0), job(2, 400.0, 100.0)]}, {"a": Pool(idle=1, held={1: 1})}, cold=9, now=0.0
    )
    assert one.promise == Promise(1, 1, 1, free_at=52.0)
    assert (two.promise, two.ends_at) == (None, 152.0)


def test_scheduling_pass_returns_the_expected_end_of_each_job() -> None:
    waiting = [job(1, 200.0, 100.0), job(2, 130.0, 100.0), job(3, 20.0, 100.0), PoolJob(4, 0.0, (50.0,))]
    pool = Pool(idle=0, busy=(40.0,), cold_s=20.0)
    found = {fate.job.id: fate for fate in walk({"a": waiting}, {"a": pool}, cold=1, now=0.0)}
    assert [(id, fate.ends_at, fate.has_devices_in_time) for id, fate in found.items()] == [
        (2, 120.0, True),  # a cold replica is ordered, because waiting would make this job late
        (1, 140.0, True),  # this job waits for the busy replica
        (3, 220.0, False),  # this job is late: it runs after the first two jobs on the first free replicas
        (4, 190.0, False),
    ]


def some_job(id: int, deadline_at: float, alone_s: float, most: int, least: int, kind: int) -> PoolJob:
    if kind == 0:
        return PoolJob(id, deadline_at, (math.inf,) * (least - 1) + (0.0,) * most, least, True)
    made = job(id, deadline_at, alone_s, most=least + most - 1)
    run_s = (math.inf,) * (least - 1) + made.run_s[least - 1 :]
    return PoolJob(id, 0.0 if kind == 1 else deadline_at, run_s, least)


jobs = some.lists(
    some.builds(
        some_job, some.integers(0, 10**6), some.floats(0.1, 500.0), some.floats(1.0, 300.0), some.integers(1, 8),
        some.sampled_from([1, 1, 1, 2, 3]), some.integers(0, 9),
    ),
    unique_by=lambda each: each.id,
    max_size=12,
)  # fmt: skip
busy = some.lists(some.floats(0.0, 400.0), max_size=8).map(tuple)
pools = some.builds(Pool, some.integers(0, 12), busy, cold_s=some.floats(0.0, 60.0))


@given(jobs, pools, some.lists(some.integers(1, 3), max_size=4), some.floats(0.0, 400.0))
def test_device_allotment_agrees_with_the_reference_algorithm(
    waiting: list[PoolJob], pool: Pool, kept: list[int], now: float
) -> None:
    promised = tuple(
        Promise(each.id, count, loaded=count, free_at=50.0) for each, count in zip(waiting, kept, strict=False)
    )
    pool = Pool(pool.idle, pool.busy, promised, pool.cold_s)
    line = line_of(waiting)
    plain = plain_pools.allot(waiting, pool, now=now)
    assert scheduling.allot(line, pool, now=now) == plain


@given(jobs, jobs, pools, pools, some.integers(0, 12), some.floats(0.0, 400.0), some.booleans(), some.integers(1, 5))
def test_replica_orders_agree_with_the_reference_for_any_round_size(
    some_jobs: list[PoolJob], more: list[PoolJob], one: Pool, two: Pool, cold: int, now: float, delay: bool, looks: int
) -> None:
    waiting = {"a": some_jobs, "b": [msgspec.structs.replace(each, id=each.id + 10**7) for each in more]}
    plain = plain_pools.order(waiting, {"a": one, "b": two}, cold=cold, now=now, delay=delay)
    assert quick_order(waiting, {"a": one, "b": two}, cold=cold, now=now, delay=delay, looks=looks) == plain


@given(
    jobs,
    some.lists(some.tuples(some.integers(0, 11), some.floats(0.0, 30.0), some.integers(0, 12)), max_size=12),
    pools,
)
def test_incrementally_updated_job_queue_equals_a_rebuilt_queue(
    waiting: list[PoolJob], steps: list[tuple[int, float, int]], pool: Pool
) -> None:
    line, here, now = JobQueue(), dict[int, PoolJob](), 0.0
    for which, later_s, idle in steps:
        now += later_s
        if which < len(waiting):
            one = waiting[which]
            if one.id in here:
                del here[one.id]
                line.remove(one.id)
            else:
                here[one.id] = one
                line.put([one], now=now)
        line.update_needs(now)
        fresh = line_of(here.values(), now=now)
        assert list(line.iter_keys_after(BEFORE_ALL_JOBS)) == list(fresh.iter_keys_after(BEFORE_ALL_JOBS)), now
        assert all(
            line.needed_replicas(id) == one.fewest_replicas(begins_at=now, most=12)
            for id, one in here.items()
            if one.deadline_at
        )
        assert line.has_hopeful_jobs == any(kind == HOPEFUL for kind, _, _ in line.iter_keys_after(BEFORE_ALL_JOBS))
        found = scheduling.allot(line, Pool(idle, pool.busy, cold_s=pool.cold_s), now=now)
        assert found == plain_pools.allot(list(here.values()), Pool(idle, pool.busy, cold_s=pool.cold_s), now=now)


@pytest.mark.parametrize("again", range(3))
def test_next_round_does_not_order_replicas_again(again: int, order: Order) -> None:
    waiting = [job(n, 60.0 + 10 * n, 100.0) for n in range(6)]
    pool = Pool(idle=again, cold_s=20.0)
    ordered = order({"a": waiting}, {"a": pool}, cold=30, now=0.0)["a"]
    pool = Pool(idle=again, promised=tuple(ordered.values()), cold_s=20.0)
    cold = 30 - sum(promise.replicas for promise in ordered.values())
    assert order({"a": waiting}, {"a": pool}, cold=cold, now=0.05) == {}
