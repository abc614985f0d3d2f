"""PromptTuner's two algorithms on cases whose answer is known by hand, and what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stoker.manager.policies.warm_pools import Job, Pool, Promise, allot, by_deadline, order


def job(id: int, deadline_at: float, alone_s: float, *, most: int = 4, meeting_s: float = 2.0) -> Job:
    """Half as long on two replicas and so on, and the time to meet."""
    shared = (alone_s / count + meeting_s for count in range(2, most + 1))
    return Job(id, deadline_at, (alone_s, *shared))


def replicas(orders: dict[str, dict[int, Promise]]) -> dict[int, int]:
    return {job: promise.replicas for ordered in orders.values() for job, promise in ordered.items()}


def test_each_gets_as_few_as_its_deadline_allows_and_the_nearest_deadline_chooses_first() -> None:
    jobs = [job(1, 200.0, 100.0), job(2, 60.0, 100.0), job(3, 30.0, 100.0)]
    assert allot(jobs, Pool(idle=7), now=0.0) == {3: 4, 2: 2, 1: 1}
    assert allot(jobs, Pool(idle=6), now=0.0) == {3: 4, 2: 2}


def test_never_more_than_there_are_nor_one_where_there_is_none() -> None:
    assert allot([job(1, 60.0, 100.0)], Pool(idle=1), now=0.0) == {}
    assert allot([job(1, 200.0, 100.0)], Pool(idle=0), now=0.0) == {}


def test_a_deadline_ages_while_a_job_waits() -> None:
    late = job(1, 200.0, 100.0)
    assert allot([late], Pool(idle=4), now=50.0) == {1: 1}
    assert allot([late], Pool(idle=4), now=120.0) == {1: 2}
    assert allot([late], Pool(idle=4), now=150.0) == {1: 3}


def test_who_is_late_whatever_happens_gets_what_nobody_else_wants() -> None:
    lost, hopeful = job(1, 10.0, 100.0), job(2, 300.0, 100.0)
    assert allot([lost, hopeful], Pool(idle=1), now=0.0) == {2: 1}
    assert allot([lost, hopeful], Pool(idle=2), now=0.0) == {1: 1, 2: 1}
    assert allot([Job(1, 0.0, (100.0,)), hopeful], Pool(idle=2), now=0.0) == {1: 1, 2: 1}


def test_a_device_whose_job_is_late_is_not_idle() -> None:
    lost = [job(1, 10.0, 100.0), job(2, 11.0, 100.0)]
    assert allot(lost, Pool(idle=1, busy=(15.0,)), now=20.0) == {1: 1}
    pools = {"a": Pool(idle=0, busy=(15.0,), cold_s=20.0)}
    assert replicas(order({"a": [job(3, 90.0, 100.0)]}, pools, cold=8, now=20.0)) == {3: 3}


def test_a_delayed_job_keeps_the_idle_device_that_it_will_need_with_another() -> None:
    """It needs two within 60 s: one is idle, the other is free at 5 s."""
    lost, delayed = job(1, 10.0, 100.0), job(2, 60.0, 100.0)
    assert allot([lost, delayed], Pool(idle=1, busy=(5.0,)), now=0.0) == {}


def test_a_job_waits_for_devices_that_come_back_in_time_and_else_for_cold_ones() -> None:
    pool = Pool(idle=0, busy=(40.0,), cold_s=20.0)
    assert order({"a": [job(1, 200.0, 100.0)]}, {"a": pool}, cold=8, now=0.0) == {}
    [ordered] = order({"a": [job(1, 130.0, 100.0)]}, {"a": pool}, cold=8, now=0.0)["a"].values()
    assert ordered == Promise(1, 1, free_at=120.0)
    [ordered] = order({"a": [job(1, 200.0, 100.0)]}, {"a": pool}, cold=8, now=0.0, delay=False)["a"].values()
    assert ordered == Promise(1, 1, free_at=120.0)


def test_two_jobs_cannot_wait_for_the_same_device() -> None:
    pool = Pool(idle=0, busy=(40.0,), cold_s=20.0)
    found = order({"a": [job(1, 200.0, 100.0), job(2, 210.0, 100.0)]}, {"a": pool}, cold=8, now=0.0)
    assert found == {"a": {2: Promise(2, 1, free_at=120.0)}}


def test_a_load_counts_and_idle_devices_are_used_first() -> None:
    """Until 70 s, after 20 s for warming: 100 s of work on two are 52 s, on three 35 s."""
    pools = {"a": Pool(idle=1, cold_s=20.0)}
    [ordered] = order({"a": [job(1, 70.0, 100.0)]}, pools, cold=8, now=0.0)["a"].values()
    assert (ordered.replicas, ordered.beside) == (2, 1)
    assert ordered.free_at == pytest.approx(20.0 + 100.0 / 3 + 2.0)
    assert order({"a": [job(1, 15.0, 100.0)]}, pools, cold=8, now=0.0) == {}


def test_the_cold_pool_is_one_for_all_models() -> None:
    jobs = {"a": [job(1, 80.0, 100.0)], "b": [job(2, 60.0, 100.0)]}
    pools = {"a": Pool(idle=0, cold_s=20.0), "b": Pool(idle=0, cold_s=20.0)}
    assert replicas(order(jobs, pools, cold=3, now=0.0)) == {2: 3}
    assert replicas(order(jobs, pools, cold=5, now=0.0)) == {2: 3, 1: 2}


def test_what_is_on_its_way_is_not_ordered_again_and_waits_for_its_job() -> None:
    waiting = job(1, 70.0, 100.0)
    coming = Pool(idle=1, promised=(Promise(1, 2, beside=1),), cold_s=20.0)
    assert order({"a": [waiting]}, {"a": coming}, cold=8, now=1.0) == {}
    assert allot([waiting, job(2, 400.0, 100.0)], coming, now=1.0) == {}
    come = Pool(idle=3, promised=(Promise(1, 2, beside=1, here=2),), cold_s=20.0)
    assert allot([waiting, job(2, 400.0, 100.0)], come, now=20.0) == {1: 3}


def test_what_is_kept_for_nobody_is_anybodys() -> None:
    assert allot([job(2, 400.0, 100.0)], Pool(idle=1, promised=(Promise(1, 2, beside=1),)), now=0.0) == {2: 1}


def test_a_job_whose_slack_is_gone_is_not_delayed() -> None:
    """On four it would be in time if it began at 95 s; should that come late, nobody could warm others for it."""
    pool = Pool(idle=0, busy=(90.0, 90.0, 90.0, 90.0), cold_s=20.0)
    near = job(1, 120.0, 100.0)
    assert order({"a": [near]}, {"a": pool}, cold=8, now=0.0) == {}
    assert order({"a": [near]}, {"a": pool}, cold=8, now=75.0) == {}
    tight = job(1, 40.0, 100.0)
    soon = Pool(idle=0, busy=(10.0, 10.0, 10.0, 10.0), cold_s=20.0)
    assert order({"a": [tight]}, {"a": soon}, cold=0, now=0.0) == {}


jobs = some.lists(
    some.builds(
        job, some.integers(0, 10**6), some.floats(0.0, 500.0), some.floats(1.0, 300.0), most=some.integers(1, 8)
    ),
    unique_by=lambda each: each.id,
    max_size=12,
)
busy = some.lists(some.floats(0.0, 400.0), max_size=8).map(tuple)


@given(jobs, some.integers(0, 12), busy)
def test_never_more_is_given_than_is_idle_and_who_can_be_in_time_on_it_is(
    waiting: list[Job], idle: int, coming: tuple[float, ...]
) -> None:
    found = allot(waiting, Pool(idle=idle, busy=coming), now=0.0)
    assert sum(found.values()) <= idle
    by_id = {each.id: each for each in waiting}
    for id, count in found.items():
        one = by_id[id]
        in_time = one.deadline_at and one.run_s[count - 1] <= one.deadline_at
        assert in_time or one.is_lost(0.0) or not one.deadline_at
        assert not in_time or count == 1 or one.run_s[count - 2] > one.deadline_at, "one fewer would have done"
    left = idle - sum(found.values())
    hopeful = [each for each in by_deadline(waiting) if each.id not in found and each.deadline_at]
    assert not any(each.fewest(begins_at=0.0, most=left) for each in hopeful)


@given(jobs, some.integers(0, 12), busy, some.integers(0, 16), some.floats(0.0, 60.0))
def test_what_is_ordered_is_there_and_makes_its_job_come_in_time(
    waiting: list[Job], idle: int, coming: tuple[float, ...], cold: int, cold_s: float
) -> None:
    pool = Pool(idle=idle, busy=coming, cold_s=cold_s)
    ordered = order({"a": waiting}, {"a": pool}, cold=cold, now=0.0).get("a", {})
    assert sum(promise.replicas for promise in ordered.values()) <= cold
    assert sum(promise.beside for promise in ordered.values()) <= idle
    by_id = {each.id: each for each in waiting}
    for id, promise in ordered.items():
        assert promise.replicas >= 1
        run_s = by_id[id].run_s[promise.replicas + promise.beside - 1]
        assert cold_s + run_s <= by_id[id].deadline_at


@pytest.mark.parametrize("again", range(3))
def test_orders_settle(again: int) -> None:
    """With what was ordered promised, nothing more is ordered: rounds come every 50 ms."""
    waiting = [job(n, 60.0 + 10 * n, 100.0) for n in range(6)]
    pool = Pool(idle=again, cold_s=20.0)
    ordered = order({"a": waiting}, {"a": pool}, cold=30, now=0.0)["a"]
    pool = Pool(idle=again, promised=tuple(ordered.values()), cold_s=20.0)
    cold = 30 - sum(promise.replicas for promise in ordered.values())
    assert order({"a": waiting}, {"a": pool}, cold=cold, now=0.05) == {}
