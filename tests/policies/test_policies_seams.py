"""Test the policy interfaces (seams) of the core with stub policies and user-defined orders of libraries."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from core.builders import Cluster, recipe
from core.builders import Make as MakeCluster
from core.toy import Toy
from policies import stubs

from benchmarks.baselines.loading import ROOT
from stoker.manager import policies
from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.report import device_seconds_by_tier
from stoker.manager.core.seams import Action, Policies, View
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.protocol import to_manager as say
from stoker.protocol.calls import FailureKind, Objective
from stoker.protocol.ids import LibraryId
from stoker.protocol.to_manager import Cancel

Make = Callable[..., Toy]
GB = 10**9


def starts(t: Toy, name: str) -> list[tuple[float, int, int]]:
    """Return (time, rank, size) of every started part of a call, sorted by time and rank."""
    mine = [(at, r, n) for p in t.pilots.values() for at, call, r, n in p.began if call == t.ids[name]]
    return sorted(mine)


# ---- gangs


@pytest.mark.parametrize("make", [stubs.policies, lambda: stubs.policies(dispatch=stubs.Elastic())])
def test_gang_starts_on_all_of_its_libraries_at_once_or_not_at_all(toy: Make, make: Callable[[], object]) -> None:
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


def test_failing_member_ends_the_gang_once(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=3)
    t.context("a").call("g", context="a", gang=(3, 3), raises=True).call("c", context="a").run()
    assert not t.ended["g"].ok
    assert t.ended["c"].ok


@pytest.mark.parametrize("first", ["a", "b"])
def test_two_gangs_that_need_the_same_devices_both_run(toy: Make, first: str) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a", declares="5 GB").context("b", declares="6 GB", load_s=2.0)
    t.call("w1", context="a").call("w2", context="b").run()  # each context has one library on its own device
    t.call("g1", context=first, gang=(2, 2)).call("g2", context="b" if first == "a" else "a", gang=(2, 2), priority=1)
    t.run(limit_s=60)
    assert t.ended["g1"].ok
    assert t.ended["g2"].ok


def test_gang_gets_its_second_device_despite_an_endless_queue(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a", declares="5 GB").context("b", declares="6 GB")
    t.call(*(f"b{n}" for n in range(100)), context="b").call("g", context="a", gang=(2, 2)).run()
    assert t.ended_at["g"] < 40


def test_cancelled_gang_releases_every_member(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("a").call("g", context="a", gang=(2, 2), run_s=1000.0).run(until=5.0)
    t.tell(Cancel([t.ids["g"]], running=True)).call("c1", "c2", context="a").run()
    assert t.now < 8
    assert t.ended["c2"].ok


# ---- memory


def test_library_grows_only_after_another_has_really_shrunk(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(residency=stubs.MoreMemory(small=1 * GB, large=7 * GB)), resize_s=2.0)
    t.pilot("p1", memory="8 GB")
    t.context("other", declares="4 GB").context("big", declares="4 GB")
    # the contexts finish loading at 1 s, then `other` needs 2 s to shrink
    t.call("c1", context="other").call("c2", context="big").run(until=3.9)
    promised = {x.context.recipe.key: x.promised_bytes for x in t.core.state.libraries.values()}
    assert promised == {"other": 1 * GB, "big": 7 * GB}
    held = {x.recipe.key: x.held_bytes for x in t.pilots["p1"].processes.values()}
    assert held == {"other": 1 * GB, "big": 4 * GB}  # `big` has not grown yet on the pilot
    t.run(until=8.0)
    held = {x.recipe.key: x.held_bytes for x in t.pilots["p1"].processes.values()}
    assert held == {"other": 1 * GB, "big": 7 * GB}


# ---- preemption


def test_evicted_call_keeps_its_progress_and_continues_elsewhere(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Preempt()))
    t.pilot("p1")
    t.context("a").call("w", context="a").run()
    t.call("low", context="a", run_s=10.0)
    t.run(until=t.now + 4.0)
    t.call("high", context="a", run_s=1.0, priority=5)
    t.run(until=t.now + 0.5)
    t.pilot("p2")  # `low` will continue on p2
    t.run()
    assert t.ended_at["high"] < t.ended_at["low"]
    _, (second, _, _) = starts(t, "low")
    assert t.ended_at["low"] - second == pytest.approx(10.0 - 4.0, abs=0.1)


def test_refused_call_runs_elsewhere_and_its_history_says_why(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Offer()), watch=frozenset({3}))
    first, second = t.pilot("p1"), t.pilot("p2")
    t.context("a").call("w1", "w2", context="a").run()
    first.refuses = "its memory is taken by somebody else"
    t.call("c", context="a").run()
    assert [call for _, call, _, _ in second.began].count(t.ids["c"]) == 1
    story = " ".join(text for _, text in t.core.state.failed_calls[t.ids["c"]].notes or ())
    assert "refused by lib-1 on p1: its memory is taken by somebody else" in story


# ---- timers and rounds


def test_policy_can_set_a_timer_and_drop_a_call_with_a_reason(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(dispatch=stubs.Deadlines()))
    t.pilot("p1")
    t.call("long", run_s=30.0).call("late", objective=Objective(deadline_at=12.0)).call("patient").run()
    failure = t.ended["late"].failure
    assert (failure.kind, failure.message) == (FailureKind.DROPPED, "its deadline at 12 s has passed")
    assert t.ended_at["late"] == 12.0
    assert t.ended["patient"].ok


def test_policy_round_receives_only_the_changes_since_the_last_round(toy: Make) -> None:
    residency = stubs.MoreMemory(small=1 * GB, large=1 * GB)
    t = toy(policies=lambda: stubs.policies(residency=residency))
    t.by_hand = True  # the test reads the state of this policy object below
    t.pilot("p1")
    t.call("c1", run_s=2.0)
    t.run(until=4.95)
    rounds = residency.seen
    assert len(rounds) == 49
    assert (rounds[0].pilots, rounds[0].calls, rounds[0].contexts) == ({"p1"}, {t.ids["c1"]}, {"bare"})
    assert rounds[0].libraries == {1}
    later = [n for n, changes in enumerate(rounds) if n and (changes.calls or changes.libraries or changes.pilots)]
    assert later == [1, 21]  # the library is ready after 0.1 s; the call ends after 2.1 s
    assert (rounds[21].calls, rounds[21].libraries) == ({t.ids["c1"]}, set())


def test_calls_start_without_waiting_for_late_advice(toy: Make) -> None:
    t = toy(policies=lambda: stubs.policies(residency=stubs.LoadOnAdvice()))
    t.advise("a", after_s=5.0, run_s=1000.0, load_s=1.0)
    t.pilot("p1")
    t.context("a").call("c1", context="a", run_s=20.0).call("c2", context="a", run_s=20.0).run()
    assert starts(t, "c1")[0][0] < 2.0
    assert t.ended["c1"].ok
    assert t.ended["c2"].failure.message == "it would take too long"
    assert t.ended_at["c2"] == pytest.approx(5.0, abs=0.1)


# ---- variants


def test_call_is_sent_to_the_best_free_variant(toy: Make) -> None:
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


# ---- virtual time


def test_prefetching_hides_the_round_trip_of_short_calls(toy: Make) -> None:
    t = toy(latency_s=0.002)
    t.pilot("p1")
    t.call("first", run_s=0.0005).run()
    before = t.now
    t.call(*(f"c{n}" for n in range(400)), run_s=0.0005).run()
    assert t.now - before < 0.0005 * 400 + 4 * 0.002 + 0.02


def test_device_seconds_are_counted_as_warm_or_cold(toy: Make) -> None:
    t = toy()
    t.pilot("p1")
    t.pilot("p2")
    t.context("llm", load_s=4.0).call("c1", context="llm", run_s=6.0).run(until=20.0)
    t.tell(say.AskStatus(), numbered=False)  # any event would do: each event tells the core the time
    tiers = device_seconds_by_tier(t.core.state)
    assert tiers["warm"] == pytest.approx(16.0, abs=0.1)
    assert tiers["cold"] == pytest.approx(24.0, abs=0.1)
    t.kill("p1")
    t.kill("p2")
    assert sum(device_seconds_by_tier(t.core.state).values()) == pytest.approx(40.0, abs=0.1)


class ColdestFirst(HottestFirst):
    """A user-defined order that considers only the library that was idle longest."""

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        return tuple(context.idle.values())


class NeverPlaces(HottestFirst):
    places_one_by_one_up_to = 0

    def place(self, view: View, call: Call) -> LibraryId | Action | None:
        raise AssertionError("it was asked about a call")


def hot(cluster: MakeCluster, dispatch: HottestFirst, *, slots: int = 1) -> Cluster:
    c = cluster(pilots=3, policies=lambda: Policies(dispatch, LoadWhereWanted(), KeepBlocks()))
    c.define(recipe("a", slots=slots)).calls(3 * slots, context="a").ready()
    for name in ("p2", "p1", "p3"):
        c.wait(1).end(*c.held(name, "a"))
    return c


@pytest.mark.parametrize(("dispatch", "order"), [(HottestFirst(), "p3 p1 p2"), (ColdestFirst(), "p2 p1 p3")])
def test_simultaneous_calls_are_offered_in_the_order_of_the_policy(
    cluster: MakeCluster, dispatch: HottestFirst, order: str
) -> None:
    c = hot(cluster, dispatch).call("c1", "c2", "c3", "c4", "c5", context="a")
    assert [c.held(name, "a") for name in order.split()] == [["c1"], ["c2"], ["c3"]]
    assert c.waiting("a") == ["c4", "c5"]


def test_free_libraries_with_several_slots_share_waiting_calls(cluster: MakeCluster) -> None:
    c = hot(cluster, HottestFirst(), slots=4).call("c1", "c2", "c3", "c4", "c5", context="a")
    assert [c.held(name, "a") for name in ("p3", "p1", "p2")] == [["c1", "c2"], ["c3"], ["c4", "c5"]]
    c.call("c6", context="a")
    assert c.held("p1", "a") == ["c3", "c6"]  # a single call is sent to the least loaded library
    c.calls(20, context="a")
    assert [len(c.held(name, "a")) for name in ("p3", "p1", "p2")] == [4, 4, 4]


def test_policy_without_single_call_placement_is_not_queried(cluster: MakeCluster) -> None:
    c = hot(cluster, NeverPlaces()).call("c1", context="a")
    assert c.held("p3", "a") == ["c1"]


FILES = sorted([*Path(policies.__file__).parent.rglob("*.py"), *(ROOT / "benchmarks" / "baselines").glob("*.py")])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def trespasses(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        nodes = list(ast.walk(kind))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        used = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
        own |= {node.attr for node in used if isinstance(node.ctx, ast.Store)}
        for node in used:
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_self or node.attr not in own:
                yield f"{kind.name}: {ast.unparse(node)}"
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        yield from (
            f"{function.name}: {ast.unparse(node)}"
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and is_private(node.attr)
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_policies_do_not_use_private_names_of_each_other(file: Path) -> None:
    assert list(trespasses(file.read_text())) == []


@pytest.mark.parametrize(
    "body", ["return self._base()", "return other._x", "return super()._base()"], ids=["inherited", "other", "super"]
)
def test_use_of_a_private_name_is_detected(body: str) -> None:
    assert list(trespasses(f"class Mine(Base):\n    def ask(self, other):\n        {body}\n"))
