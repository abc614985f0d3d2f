"""What the core carries for the papers' policies, proven with stub policies over the toy cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.toy import Toy
from policies import stubs

from stoker.manager.core.events import SessionDefined
from stoker.manager.core.nouns import LibraryState, PilotState
from stoker.manager.policies import LoadWhereWanted
from stoker.protocol.blocks import Source
from stoker.protocol.calls import FailureKind, Objective
from stoker.protocol.to_manager import Cancel

Make = Callable[..., Toy]
GB = 10**9


def starts(t: Toy, name: str) -> list[tuple[float, int, int]]:
    """(when, rank, size) of every part of a call that began, by time and rank."""
    mine = [(at, r, n) for p in t.pilots.values() for at, call, r, n in p.began if call == t.ids[name]]
    return sorted(mine)


# ---- gangs


@pytest.mark.parametrize("make", [stubs.policies, lambda: stubs.policies(dispatch=stubs.Elastic())])
def test_a_gang_starts_on_all_of_its_libraries_at_once_or_not_at_all(toy: Make, make: Callable[[], object]) -> None:
    t = toy(policies=make)
    t.pilot("p1", devices=2)
    t.context("a").call("g", context="a", gang=(3, 3)).run(until=5.0)
    assert starts(t, "g") == []
    t.pilot("p2", devices=2)
    t.run()
    parts = starts(t, "g")
    assert [(rank, size) for _, rank, size in parts] == [(0, 3), (1, 3), (2, 3)]
    assert parts[0][0] == parts[2][0]
    assert t.ended["g"].ok


def test_a_gang_takes_what_it_can_get_between_its_bounds(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Elastic()))
    t.pilot("p1", devices=3)
    t.context("a", load_s=0.5).call("w1", "w2", "w3", context="a").run()
    t.call("g", context="a", gang=(2, 8)).run()
    assert [size for _, _, size in starts(t, "g")] == [3, 3, 3]


def test_losing_a_member_restarts_the_gang_as_a_whole(toy: Make) -> None:
    t = toy()
    for name in ("p1", "p2", "p3"):
        t.pilot(name)
    t.context("a").call("w1", "w2", "w3", context="a").run()
    t.call("g", context="a", gang=(2, 2), run_s=5.0)
    t.run(until=t.now + 2.0)
    member = next(iter(t.core.state.calls[t.ids["g"]].holder.members)).pilot.id  # type: ignore[union-attr,index]
    t.kill(member)
    t.run()
    parts = starts(t, "g")
    assert len(parts) == 4
    assert {size for _, _, size in parts} == {2}
    assert parts[2][0] == parts[3][0] > parts[1][0]
    assert t.ended["g"].ok
    assert len(t.ended) == 4


def test_a_member_that_fails_ends_the_gang_once(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=3)
    t.context("a").call("g", context="a", gang=(3, 3), raises=True).call("c", context="a").run()
    assert not t.ended["g"].ok
    assert t.ended["c"].ok


def test_a_gang_that_kills_its_libraries_is_poison(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a").call("g", context="a", gang=(2, 2), kills=True).call("c", context="a").run()
    assert t.ended["g"].failure.kind is FailureKind.POISON  # type: ignore[union-attr]
    assert t.ended["c"].ok


@pytest.mark.parametrize("make", [stubs.policies, lambda: stubs.policies(dispatch=stubs.Elastic())])
def test_two_gangs_do_not_wait_for_each_other_for_ever(toy: Make, make: Callable[[], object]) -> None:
    t = toy(policies=make)
    t.pilot("p1", devices=4)
    t.context("a").call("w1", "w2", "w3", "w4", context="a", gang=(1, 1)).run()
    t.call("g1", context="a", gang=(3, 3), run_s=2.0).call("g2", context="a", gang=(3, 3), run_s=2.0)
    t.call("c1", "c2", context="a").run()
    first, second = starts(t, "g1"), starts(t, "g2")
    assert len(first) == len(second) == 3
    assert abs(first[0][0] - second[0][0]) >= 2.0


def test_a_library_that_is_full_with_what_it_has_just_been_given_is_in_no_gang(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a", slots=2).call("w1", "w2", "w3", "w4", context="a").run()
    t.call("l1", "l2", "l3", "l4", context="a", run_s=5.0).call("c1", "c2", context="a").call(
        "g", context="a", gang=(2, 2)
    )
    t.run()
    assert all(end.ok for end in t.ended.values())


@pytest.mark.parametrize("first", ["a", "b"])
def test_two_gangs_of_two_contexts_that_need_the_same_devices_both_run(toy: Make, first: str) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a", declares="5 GB").context("b", declares="6 GB", load_s=2.0)
    t.call("w1", context="a").call("w2", context="b").run()  # one library each, on one device each
    t.call("g1", context=first, gang=(2, 2)).call("g2", context="b" if first == "a" else "a", gang=(2, 2), priority=1)
    t.run(limit_s=60)
    assert t.ended["g1"].ok
    assert t.ended["g2"].ok


def test_a_gang_gets_its_second_device_from_a_queue_that_never_ends(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a", declares="5 GB").context("b", declares="6 GB")
    t.call(*(f"b{n}" for n in range(100)), context="b").call("g", context="a", gang=(2, 2)).run()
    assert t.ended_at["g"] < 40


def test_a_cancelled_gang_lets_every_member_go(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a").call("g", context="a", gang=(2, 2), run_s=1000.0).run(until=5.0)
    t.tell(Cancel([t.ids["g"]], running=True)).call("c1", "c2", context="a").run()  # type: ignore[list-item]
    assert t.now < 8
    assert t.ended["c2"].ok


# ---- memory


def test_growing_waits_until_shrinking_has_really_happened(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(residency=stubs.MoreMemory(small=1 * GB, large=7 * GB)), resize_s=2.0)
    t.pilot("p1", memory="8 GB")
    t.context("other", declares="4 GB").context("big", declares="4 GB")
    t.call("c1", context="other").call("c2", context="big").run(until=3.9)  # loaded at 1 s, then 2 s to shrink
    promised = {x.context.recipe.key: x.promised_bytes for x in t.core.state.libraries.values()}
    assert promised == {"other": 1 * GB, "big": 7 * GB}
    held = {x.recipe.key: x.held_bytes for x in t.pilots["p1"].libraries.values()}
    assert held == {"other": 1 * GB, "big": 4 * GB}  # the pilot has not grown it yet
    t.run(until=8.0)
    held = {x.recipe.key: x.held_bytes for x in t.pilots["p1"].libraries.values()}
    assert held == {"other": 1 * GB, "big": 7 * GB}


# ---- preemption


def test_an_evicted_call_keeps_its_progress_and_goes_on_elsewhere(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Preempt()))
    t.pilot("p1")
    t.context("a").call("w", context="a").run()
    t.call("low", context="a", run_s=10.0)
    t.run(until=t.now + 4.0)
    t.call("high", context="a", run_s=1.0, priority=5)
    t.run(until=t.now + 0.5)
    t.pilot("p2")  # where `low` will go on
    t.run()
    assert t.ended_at["high"] < t.ended_at["low"]
    _, (second, _, _) = starts(t, "low")
    assert t.ended_at["low"] - second == pytest.approx(10.0 - 4.0, abs=0.1)


def test_a_refused_offer_is_tried_elsewhere_and_its_story_says_why(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Offer()), watch=frozenset({3}))
    first, second = t.pilot("p1"), t.pilot("p2")
    t.context("a").call("w1", "w2", context="a").run()
    first.refuses = "its memory is taken by somebody else"
    t.call("c", context="a").run()
    assert [call for _, call, _, _ in second.began].count(t.ids["c"]) == 1
    story = " ".join(text for _, text in t.core.state.failed[t.ids["c"]].notes or ())
    assert "refused by lib-1 on p1: its memory is taken by somebody else" in story


# ---- time


def test_a_policy_gets_its_timer_back_and_may_drop_a_call_with_a_reason(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Deadlines()))
    t.pilot("p1")
    t.call("long", run_s=30.0).call("late", objective=Objective(deadline_at=12.0)).call("patient").run()
    failure = t.ended["late"].failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.DROPPED, "its deadline at 12 s has passed")
    assert t.ended_at["late"] == 12.0
    assert t.ended["patient"].ok


def test_rounds_are_told_what_changed_since_the_last_and_nothing_else(toy: Make) -> None:
    residency = stubs.MoreMemory(small=1 * GB, large=1 * GB)
    t = toy(policies=lambda: stubs.policies(residency=residency))
    t.by_hand = True  # one policy object, looked at below
    t.pilot("p1")
    t.call("c1", run_s=2.0)
    t.run(until=4.95)
    rounds = residency.seen
    assert len(rounds) == 49
    assert (rounds[0].pilots, rounds[0].calls, rounds[0].contexts) == ({"p1"}, {t.ids["c1"]}, {"bare"})
    assert rounds[0].libraries == {1}
    later = [n for n, changes in enumerate(rounds) if n and (changes.calls or changes.libraries or changes.pilots)]
    assert later == [1, 21]  # ready after 0.1 s; ended after 2.1 s
    assert (rounds[21].calls, rounds[21].libraries) == ({t.ids["c1"]}, set())


def test_advice_comes_late_and_nothing_waits_for_it(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(residency=stubs.Advised()))
    t.advise("a", after_s=5.0, run_s=1000.0, load_s=1.0)
    t.pilot("p1")
    t.context("a").call("c1", context="a", run_s=20.0).call("c2", context="a", run_s=20.0).run()
    assert starts(t, "c1")[0][0] < 2.0
    assert t.ended["c1"].ok
    assert t.ended["c2"].failure.message == "it would take too long"  # type: ignore[union-attr]
    assert t.ended_at["c2"] == pytest.approx(5.0, abs=0.1)


# ---- what serves a call, and where


def test_a_call_goes_to_the_best_variant_that_is_free(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Variants()))
    t.pilot("p1", devices=2)
    t.context("short", declares="6 GB").context("long", declares="6 GB")
    t.call("s", context="short").call("l", context="long").run()
    t.call("busy", context="short", run_s=50.0)
    t.call("c", context="short", variants=("long",)).run()
    assert t.ended_at["c"] < 10
    runs = {x.context.recipe.key: x.served for x in t.core.state.libraries.values()}
    assert runs == {"short": 2, "long": 2}


# ---- pilots


def test_what_if_there_were_one_more_pilot_is_answered_by_the_residency_policy(toy: Make) -> None:
    def make() -> object:
        residency = LoadWhereWanted()
        return stubs.policies(residency=residency, provisioning=stubs.WhatIf(residency))

    t = toy(policies=make)
    t.give(SessionDefined((Source("cpus", most=1),)))
    t.pilot("p1")
    t.run(until=1.0)
    t.context("a", load_s=5.0).call("w", context="a", run_s=1.0).run()
    assert not t.core.state.blocks
    t.call(*(f"few{n}" for n in range(4)), context="a", run_s=1.0)
    t.pilot("p2", kind="toaster", memory="1 MB")  # something changes, but is of no use
    t.run()
    assert not t.core.state.blocks
    t.call(*(f"many{n}" for n in range(40)), context="a", run_s=1.0)
    t.run(until=t.now + 1)
    assert [(x.id, x.source.source.name) for x in t.core.state.blocks.values()] == [("b1", "cpus")]
    assert "imagined" not in t.core.state.pilots
    t.run()


def test_a_released_pilot_finishes_what_it_runs_and_goes(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(provisioning=stubs.Lease(lease_s=10.0)))
    t.give(SessionDefined((Source("cpus", most=2),)))
    t.pilot("p1", block="b1")
    t.call("short", run_s=0.001).run()
    t.call("long", run_s=30.0).call("more", run_s=1.0)
    t.run(until=12.0)
    assert t.core.state.pilots["p1"].state is PilotState.DRAINING  # type: ignore[index]
    t.run(until=35.0)
    assert t.ended["long"].ok
    assert t.core.state.pilots == {}
    assert (t.open(), t.core.state.lost_pilots) == (["more"], 0)
    t.pilot("p2")
    t.run()
    assert t.ended["more"].ok


def test_one_plan_evicts_a_library_and_loads_another_in_its_place(toy: Make) -> None:
    """The pilot begins the load when the memory is free: a library told to stop keeps its memory until it is gone."""
    t = toy()
    pilot = t.pilot("p1", memory="8 GB")
    t.context("a", declares="8 GB").context("b", declares="8 GB")
    t.call("a1", context="a", run_s=3.0).run()
    t.call("b1", context="b")
    states = {x.context.recipe.key: x.state for x in t.core.state.libraries.values()}
    assert states == {"a": LibraryState.STOPPING, "b": LibraryState.LOADING}
    assert [x.recipe.key for x in pilot.libraries.values() if x.held_bytes] == ["a"]
    t.run()
    assert [x.recipe.key for x in pilot.libraries.values() if x.held_bytes] == ["b"]
    assert t.ended["b1"].ok
