from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sim.worlds import GPU, NOW, calls, model, simulate, source, world

from stoker.manager.core.nouns import Call, CallState, Context, Library
from stoker.manager.core.seams import Action, Changes, Evict, Policies, SendGang, View
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.runs import (
    CompletedWork,
    compute_best_speedup,
    compute_speedup,
    minimum_call_s,
    parse_completed_work,
    plan_run_schedule,
)
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, Preempt, SourceModel, World
from stoker.manager.study.measures import measure_run
from stoker.protocol.calls import CallSpec, Features
from stoker.protocol.ids import make_call_id
from stoker.site import Duration, Size

TALKS = replace(NOW, progress_s=Duration(1.0))
"""Running calls report their progress every second."""


def cluster(pilots: object, context: ContextModel, *, delays: Delays = NOW, **more: object) -> World:
    most = pilots if isinstance(pilots, int) else max(count for _, count in pilots)
    return world(source(pilots, init_blocks=most, **more), context, delays=delays)


def gang(size: int, *, most: int = 0, at_s: float = 0.0, **more: object) -> Arrival:
    return Arrival(at_s, "llm", gang=(size, most or size), **{"items": 120, **more})


class Everywhere(LoadWhereWanted):
    def worth_loading(self, context: Context, alive: list[Library]) -> int:
        return max(0, 4 - len(alive))


def hot(small: World, call: Arrival) -> Simulation:
    """Return a simulation in which four libraries are loaded at 12 s, when the call arrives."""
    policies = Policies(HottestFirst(), Everywhere(), KeepBlocks())
    return Simulation(small, [*calls(1), replace(call, at_s=12.0)], policies)


def runs(log: EventLog, call: int) -> list[tuple[float, float, int]]:
    """Return start, stop and rank of each part of a call, sorted by start."""
    begins, stops = (LoggedEvent.CALL_BEGAN, LoggedEvent.PART_BEGAN), (
        LoggedEvent.CALL_ENDED, LoggedEvent.PART_ENDED, LoggedEvent.CALL_LEFT, LoggedEvent.PART_LEFT
    )  # fmt: skip
    open_parts: dict[int, tuple[float, int]] = {}
    found = []
    for what, of, library, at_s, value in zip(log.what, log.call, log.library, log.at_s, log.value, strict=True):
        if of == call and what in begins:
            open_parts[library] = at_s, 0 if what == LoggedEvent.CALL_BEGAN else int(value)
        elif of == call and what in stops:
            began_at, rank = open_parts.pop(library)
            found.append((began_at, at_s, rank))
    assert not open_parts
    return sorted(found)


# ---- durations


@pytest.mark.parametrize(("size", "efficiency", "took_s"), [
    (1, 1.0, 3.0 + 120.0), (2, 1.0, 3.0 + 2.0 + 60.0), (4, 1.0, 3.0 + 2.0 + 30.0), (4, 0.9, 3.0 + 2.0 + 30.0 / 0.81),
])  # fmt: skip
def test_gang_starts_together_and_divides_the_items(size: int, efficiency: float, took_s: float) -> None:
    context = model(gang_s=Duration(2.0), gang_efficiency=efficiency, call_s={"": Duration(3.0)})
    run, outcome = simulate(cluster(4, context), [gang(size)])
    assert outcome.ended_at == pytest.approx(10.0 + took_s, abs=1e-5)
    assert [(began_at, rank) for began_at, _, rank in runs(run.log, 0)] == [(10.0, rank) for rank in range(size)]
    assert outcome.busy_s == pytest.approx(size * took_s, abs=1e-4)


def test_gang_does_not_divide_fixed_work_and_may_skip_items() -> None:
    fixed = gang(4, fixed_s=5.0, items_done=40)
    run, outcome = simulate(cluster(4, model()), [fixed])
    assert outcome.ended_at == pytest.approx(10.0 + 5.0 + 10.0)
    assert (outcome.items, run.log.value[run.log.what.index(LoggedEvent.CALL_CAME)]) == (40, 120.0)


@pytest.mark.parametrize("size", [1, 4])
def test_gang_divides_shared_work_before_its_first_item(size: int) -> None:
    searched = gang(size, shared_s=8.0, items_done=40)
    _, outcome = simulate(cluster(4, model()), [searched])
    assert outcome.ended_at == pytest.approx(10.0 + (8.0 + 40.0) / size)


def test_gang_runs_at_the_speed_of_its_slowest_member() -> None:
    kinds = {"gpu": GPU, "slow": DeviceKind(Size(24_000_000_000), speed=0.5)}
    pools = tuple(SourceModel(kind, kind, capacity=1, max_blocks=1, init_blocks=1) for kind in kinds)
    small = World(kinds, pools, {"llm": model(load_s=1.0)}, delays=NOW)
    _, outcome = simulate(small, [gang(2)])
    assert outcome.ended_at == pytest.approx(1.0 + 2 * 60.0)


# ---- libraries of several devices


def test_other_work_on_any_device_of_a_gang_slows_it() -> None:
    one, other = model(memory_gb=8, load_s=1.0), model(memory_gb=8, load_s=1.0)
    small = replace(cluster(2, one), contexts={"llm": one, "other": other})
    _, outcome = simulate(small, [gang(2), Arrival(0.0, "other", items=20)])
    # the gang runs at half speed while the other call runs for 40 s
    assert outcome.ended_at == pytest.approx(1.0 + 60.0 + 20.0)


def test_library_of_several_devices_uses_them_all() -> None:
    small = world(source(1, devices=8), model(devices=4, memory_gb=20))
    run, outcome = simulate(small, calls(10))
    assert outcome.ended_at == pytest.approx(10.0 + 5.0)  # two libraries of four devices each run the calls
    assert (outcome.busy_s, outcome.warm_s) == (pytest.approx(8 * 5.0), pytest.approx(8 * 15.0))
    assert {library.needs.devices for library in (c.recipe for c in run.core.state.contexts.values())} == {4}
    measured = measure_run(run.log)
    assert (measured.useful_s, measured.loading_s, measured.held_s) == pytest.approx((40.0, 80.0, 120.0))


# ---- losses and checkpoints


@pytest.mark.parametrize(("delays", "ended_at"), [
    (NOW, 30.5 + 120.0 / 3),  # the gang starts again from the beginning
    (TALKS, 30.5 + (120.0 - 4 * 18.0) / 3),  # the gang resumes from its last report, at 30 s
])  # fmt: skip
def test_gang_that_loses_a_member_resumes_from_its_checkpoint(delays: Delays, ended_at: float) -> None:
    run = hot(cluster([(0.0, 4), (30.5, 3)], model(), delays=delays), gang(3, most=4))
    outcome = run.run()
    first, second = runs(run.log, 1)[:4], runs(run.log, 1)[4:]
    assert {(began_at, rank) for began_at, _, rank in first} == {(12.0, rank) for rank in range(4)}
    assert {(began_at, rank) for began_at, _, rank in second} == {(30.5, rank) for rank in range(3)}
    assert outcome.ended_at == pytest.approx(ended_at, abs=1e-5)
    assert (outcome.failed, outcome.lost_pilots) == ({}, 1)
    # The other members stopped and kept their contexts.
    assert Counter(run.log.what)[LoggedEvent.LIBRARY_READY] == 4


def test_measures_separate_useful_and_lost_work_of_a_gang() -> None:
    run = hot(cluster([(0.0, 4), (30.5, 3)], model(), delays=TALKS), gang(3, most=4))
    run.run()
    measured = measure_run(run.log)
    assert (measured.calls, measured.items, len(measured.turnarounds_s)) == (2, 121.0, 2)
    # One call took 1 s. The gang ran on four libraries until 30 s. Three libraries then ran the other 48 items. Four
    # libraries lost half a second each.
    assert measured.useful_s == pytest.approx(1.0 + 4 * 18.0 + 48.0)
    assert measured.lost_s == pytest.approx(4 * 0.5)
    assert (measured.queue.value_at(20.0), measured.queue.values[-1]) == (0.0, 0.0)


class Halves(HottestFirst):
    """Evict a gang of four at 20 s, then give it two libraries."""

    period_s = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.evicted = False

    def on_round(self, view: View, changes: Changes) -> Sequence[Action]:
        held = [call for call in view.calls.values() if call.state is CallState.HELD]
        if view.now < 20.0 or self.evicted or not held:
            return ()
        self.evicted = True
        return (Evict(held[0].id),)

    def _start_gang_if_ready(self, context: Context, call: Call) -> SendGang | None:
        plan = super()._start_gang_if_ready(context, call)
        return replace(plan, libraries=plan.libraries[:2]) if plan is not None and self.evicted else plan


def test_evicted_gang_keeps_its_progress_and_libraries() -> None:
    policies = Policies(Halves(), Everywhere(), KeepBlocks())
    run = Simulation(cluster(4, model()), [*calls(1), gang(2, most=4, at_s=12.0)], policies)
    outcome = run.run()
    assert {(began_at, rank) for began_at, _, rank in runs(run.log, 1)[:4]} == {(12.0, rank) for rank in range(4)}
    assert {(began_at, rank) for began_at, _, rank in runs(run.log, 1)[4:]} == {(20.0, 0), (20.0, 1)}
    assert outcome.ended_at == pytest.approx(20.0 + (120.0 - 4 * 8.0) / 2, abs=1e-5)
    measured = measure_run(run.log)
    assert (measured.useful_s, measured.lost_s) == (pytest.approx(121.0), pytest.approx(0.0))
    assert Counter(run.log.what)[LoggedEvent.LIBRARY_ENDED] == 0


# ---- random worlds


def test_manager_learns_the_pace_of_gangs_from_progress_reports() -> None:
    small = cluster(4, model(gang_s=Duration(2.0), gang_efficiency=0.9), delays=TALKS)
    run, _ = simulate(small, [gang(4), gang(2, at_s=1.0, items_done=50)])
    paces = run.core.state.contexts["llm"].paces
    for size in (2, 4):
        assert paces.measured[size][0] == pytest.approx(1.0 / compute_speedup(size, efficiency=0.9), rel=0.05)


@st.composite
def unsteady(draw: st.DrawFn) -> tuple[World, list[Arrival]]:
    """Run gangs of two contexts while pilots join and leave; enough pilots remain for every gang."""
    changes = draw(st.lists(st.tuples(st.integers(5, 90), st.integers(0, 5)), max_size=6, unique_by=lambda c: c[0]))
    steps = [(0.0, draw(st.integers(1, 5))), *((float(at), count) for at, count in sorted(changes)), (91.0, 4)]
    pool = source(
        steps, max_blocks=6, keep_pending=6, min_blocks=4, init_blocks=4, devices=draw(st.integers(1, 2)),
        preempt=draw(st.sampled_from(Preempt)),
    )  # fmt: skip
    contexts = {
        name: model(
            memory_gb=draw(st.sampled_from([8, 20])), load_s=draw(st.sampled_from([0.5, 6.0])),
            gang_s=Duration(draw(st.sampled_from([0.0, 1.5]))), slots=draw(st.sampled_from([1, 1, 2])),
            item_cv=draw(st.sampled_from([0.0, 0.5])),
        )
        for name in "ab"
    }  # fmt: skip
    delays = Delays(back_s=Duration(1.0), poll_s=Duration(0.5), progress_s=Duration(draw(st.sampled_from([0.0, 2.0]))))
    arrivals = [
        Arrival(float(at), name, items, gang=(least, least + more), fixed_s=fixed_s, items_done=min(items, done))
        for at, name, items, least, more, fixed_s, done in sorted(
            draw(
                st.lists(
                    st.tuples(
                        st.integers(0, 60), st.sampled_from("ab"), st.integers(1, 30), st.integers(1, 3),
                        st.integers(0, 3), st.sampled_from([0.0, 3.0]), st.integers(0, 20),
                    ),
                    min_size=1, max_size=12,
                )
            )
        )
    ]  # fmt: skip
    return World({"gpu": GPU}, (pool,), contexts, delays=delays), arrivals


@given(made=unsteady(), seed=st.integers(0, 2))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_call_ends_once_and_its_members_run_together(made: tuple[World, list[Arrival]], seed: int) -> None:
    small, arrivals = made
    run, outcome = simulate(small, arrivals, seed=seed, until_s=5000.0)
    assert (outcome.complete, outcome.calls, outcome.failed) == (True, len(arrivals), {})
    assert run.core.state.calls == {}
    assert not run.gathering_runs
    for number, arrival in enumerate(arrivals):
        _check_runs(run.log, make_call_id(client=0, sequence=number), arrival.gang)


def _check_runs(log: EventLog, call: int, bounds: tuple[int, int]) -> None:
    by_start: dict[float, list[tuple[float, int]]] = {}
    for began_at, stopped_at, rank in runs(log, call):
        by_start.setdefault(began_at, []).append((stopped_at, rank))
    for parts in by_start.values():
        assert sorted(rank for _, rank in parts) == list(range(len(parts)))
        assert bounds[0] <= len(parts) <= bounds[1]
    last = max(by_start)
    assert len({stopped_at for stopped_at, _ in by_start[last]}) == 1
    starts = sorted(by_start)
    for before, after in pairwise(starts):
        assert max(stopped_at for stopped_at, _ in by_start[before]) <= after


# ---- the arithmetic


def test_inefficient_gang_is_fastest_at_its_smallest_size() -> None:
    assert [compute_speedup(size, efficiency=0.5) for size in (1, 2, 8)] == pytest.approx([1.0, 1.0, 1.0])
    assert compute_best_speedup((1, 8), efficiency=0.4) == 1.0
    assert compute_best_speedup((2, 8), efficiency=0.9) == pytest.approx(8 * 0.9**3)
    assert minimum_call_s(model(gang_s=Duration(5.0)), 1.0, 4.0, gang=(1, 8)) == pytest.approx(1.0 + 4.0)
    assert minimum_call_s(model(gang_s=Duration(5.0)), 1.0, 4.0, gang=(4, 8)) == pytest.approx(1.0 + 5.0 + 0.5)


@given(
    part=st.floats(0.0, 1.0), size=st.integers(1, 8), fixed_s=st.sampled_from([0.0, 4.0]),
    shared_s=st.sampled_from([0.0, 8.0]),
    before=st.sampled_from([CompletedWork(), CompletedWork(0.5, 0.0), CompletedWork(1.0, 7.25)]),
)  # fmt: skip
def test_interrupted_call_continues_from_its_finished_work(
    part: float, size: int, fixed_s: float, shared_s: float, before: CompletedWork
) -> None:
    context = model(gang_s=Duration(2.0), gang_efficiency=0.9)
    spec = CallSpec(
        make_call_id(client=0, sequence=0),
        b"",
        Features(items=20, fixed_s=fixed_s, shared_s=shared_s),
        before.to_bytes(),
    )
    whole = plan_run_schedule(context, spec, call_s=1.0, item_s=1.0, items=20, factor=1.5, size=size)
    cut = replace(spec, progress=whole.work_done_after(part * whole.whole_s).to_bytes())
    rest = plan_run_schedule(context, cut, call_s=1.0, item_s=1.0, items=20, factor=1.5, size=size)
    assert parse_completed_work(cut) >= before
    done_s = max(0.0, part * whole.whole_s - whole.meet_s)
    assert rest.whole_s == pytest.approx(whole.whole_s - done_s)
    assert whole.work_done_after(whole.whole_s) == CompletedWork(1.0, 20.0)
