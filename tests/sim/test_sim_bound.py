"""Test the clairvoyant lower bound in worlds with a known optimum: no policy ends before the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sim.worlds import NOW, calls, model, simulate, source, world

from benchmarks.baselines.forgetful import OneCallEach
from benchmarks.baselines.loading import policy
from stoker.contexts.recipe import Awareness
from stoker.manager.core.nouns import Context
from stoker.manager.core.seams import Action, Dispatch, Load, Policies, View
from stoker.manager.policies import SHIPPED, HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.policies.where_to_load import accepts_device_kind
from stoker.manager.sim.bound import BoundReason, LowerBound, compute_lower_bound
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, DeviceKind, Files, Links, Rate, SourceModel, World, limit_awareness
from stoker.protocol.ids import RecipeKey
from stoker.site import BASELINES, Duration, Size

GB = 1_000_000_000
FILES = (Files("weights", Size(10 * GB)),)


def several(
    speeds: Sequence[float], contexts: dict[str, ContextModel], *, links: Links | None = None, **more: Any
) -> World:
    kinds = {f"gpu{n}": DeviceKind(Size(24 * GB), speed=speed) for n, speed in enumerate(speeds)}
    sources = tuple(
        SourceModel(kind, kind, **{"capacity": 1, "max_blocks": 1, "keep_pending": 1, "init_blocks": 1, **more})
        for kind in kinds
    )
    return World(devices=kinds, sources=sources, contexts=contexts, links=links or Links(), delays=NOW)


# ---- worlds whose known optimum is reached


REACHED = {
    "one device": (world(source(1), model()), calls(100), 10.0 + 100.0),
    "four devices": (world(source(4), model()), calls(100), 10.0 + 25.0),
    "a queue and a boot": (
        world(source(1, wait_s=Duration(5.0), boot_s=Duration(3.0)), model()), calls(50), 5.0 + 3.0 + 10.0 + 50.0,
    ),
    "capacity that comes later": (world(source([(0.0, 0), (50.0, 2)]), model()), calls(20), 50.0 + 10.0 + 10.0),
    "a call that comes late": (world(source(1), model()), [Arrival(0.0, "llm"), Arrival(100.0, "llm")], 101.0),
    "a call that is long": (world(source(4), model()), [*calls(3), Arrival(0.0, "llm", items=90)], 10.0 + 90.0),
    "calls that come faster than they are done": (
        world(source(1), model()), calls(100, every_s=0.5), 10.0 + 100.0,
    ),
    "devices of several speeds": (several([1.0, 3.0], {"llm": model()}), calls(120), 10.0 + 30.0),
    "several calls at once": (world(source(1), model(slots=4)), calls(100), 10.0 + 25.0),
    "two contexts on a device": (
        several([1.0], {"a": model(), "b": model()}),
        [Arrival(0.0, name) for name in "ab" for _ in range(50)], 10.0 + 100.0,
    ),
    "two contexts of two slots on a device": (
        several([1.0], {"a": model(slots=2), "b": model(slots=2)}),
        [Arrival(0.0, name) for name in "ab" for _ in range(50)], 10.0 + 50.0,
    ),
    "files that come over the network": (
        world(source(1), model(files=FILES), links=Links(network=Rate(1.0 * GB))), calls(30), 10.0 + 10.0 + 30.0,
    ),
    "files that leave the shared storage once": (
        world(source(1), model(files=FILES), links=Links(shared=Rate(0.5 * GB))), calls(30), 20.0 + 10.0 + 30.0,
    ),
    "libraries of two devices": (world(source(2, devices=4), model(devices=2)), calls(100), 10.0 + 25.0),
    "calls that end before all their items, after a while of their own": (
        world(source(1), model()), [Arrival(0.0, "llm", items=9, fixed_s=3.0, items_done=4)] * 5, 10.0 + 5 * 7.0,
    ),
    "nothing to do": (world(source(1), model()), [], 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", REACHED)
def test_lower_bound_equals_the_known_optimum(name: str) -> None:
    small, arrivals, optimum = REACHED[name]
    assert compute_lower_bound(small, arrivals).ends_at == pytest.approx(optimum, abs=1e-3)
    if arrivals:
        assert simulate(small, arrivals)[1].ended_at == pytest.approx(optimum, abs=1e-3)


# ---- worlds with a known optimum


def test_lower_bound_counts_devices_until_their_removal() -> None:
    pool = source([(0.0, 2), (30.5, 1)])
    assert compute_lower_bound(world(pool, model()), calls(100)).ends_at == pytest.approx(30.5 + 59.0, abs=1e-3)


def test_lower_bound_counts_one_load_per_block_with_a_walltime() -> None:
    pool = source(1, walltime_s=Duration(100.0), keep_pending=1)
    bound = compute_lower_bound(world(pool, model()), calls(150)).ends_at
    # the bound assumes that a device runs calls for 90 of every 100 s: 166.7 s; the optimum is 170 s
    assert bound == pytest.approx(150.0 / 0.9, abs=1e-3)
    assert bound < simulate(world(pool, model()), calls(150))[1].ended_at


def test_files_already_read_for_another_context_are_cached() -> None:
    early, late = model(files=FILES, load_s=0.0), model(files=(*FILES, Files("code", Size(GB))), load_s=0.0)
    small = several([1.0], {"early": early, "late": late}, links=Links(network=Rate(1.0 * GB)))
    bound = compute_lower_bound(small, [Arrival(0.0, "early"), Arrival(50.0, "late")])
    assert bound.ends_at == pytest.approx(50.0 + 1.0 + 1.0, abs=1e-3)


def test_gangs_and_checkpointing_calls_have_no_bound() -> None:
    unknown = [
        (world(source(2), model()), [Arrival(0.0, "llm", gang=(1, 2))]),
        (world(source(2), model(), delays=replace(NOW, progress_s=Duration(1.0))), calls(1)),
    ]
    for small, arrivals in unknown:
        assert compute_lower_bound(small, arrivals) == LowerBound(0.0, BoundReason.UNKNOWN)


def test_lower_bound_of_impossible_work_is_infinite() -> None:
    never = [
        (world(source([(0.0, 1), (50.0, 0)]), model()), calls(41)),
        (world(source(0, max_blocks=1, keep_pending=1), model()), calls(1)),
        (world(source(1), model(kinds=("other",))), calls(1)),
        (world(source(9, devices=3), model(devices=4)), calls(1)),
        (world(source(1, walltime_s=Duration(9.0)), model()), calls(1)),
    ]
    for small, arrivals in never:
        assert compute_lower_bound(small, arrivals).ends_at == math.inf
        assert compute_lower_bound(small, arrivals).limit is BoundReason.NEVER
    assert compute_lower_bound(never[0][0], calls(40)).ends_at == pytest.approx(50.0, abs=1e-3)


def test_lower_bound_states_if_devices_or_a_call_limit_the_run() -> None:
    assert compute_lower_bound(world(source(1), model()), calls(100)).limit is BoundReason.DEVICES
    assert compute_lower_bound(world(source(4), model()), [*calls(9), Arrival(99.0, "llm")]).limit is BoundReason.CALL


# ---- no shipped or crowding policy beats the bound


def rates(*, finite: float) -> st.SearchStrategy[Rate]:
    return st.sampled_from([Rate(math.inf), Rate(finite), Rate(3 * finite)])


seconds = st.sampled_from([0.0, 0.5, 2.0, 7.3]).map(Duration)
spreads = st.sampled_from([0.0, 0.0, 0.4])
models = st.builds(
    ContextModel,
    files=st.sampled_from([(), FILES, (*FILES, Files("code", Size(GB), operations=50))]),
    awareness=st.sampled_from(Awareness),
    device_memory_bytes=st.sampled_from([0, 6, 10, 14]).map(lambda size: Size(size * GB)),
    slots=st.integers(1, 3),
    start_s=seconds,
    load_s=st.dictionaries(st.sampled_from(["", "fast", "slow"]), seconds, max_size=2),
    load_cv=spreads,
    call_s=st.dictionaries(st.sampled_from(["", "fast"]), seconds, max_size=1),
    item_s=st.dictionaries(st.sampled_from(["", "fast", "slow"]), seconds, min_size=1, max_size=2),
    item_cv=spreads,
    warm_items=st.integers(0, 2),
    warm_item_s=seconds,
    page_cache=st.booleans(),
    devices=st.sampled_from([1, 1, 2]),
)
links = st.builds(
    Links,
    shared=rates(finite=1.0 * GB),
    shared_node=rates(finite=1.0 * GB),
    shared_operations=st.sampled_from([0.0, 20.0]),
    disk=rates(finite=2.0 * GB),
    memory=rates(finite=2.0 * GB),
    network=rates(finite=1.0 * GB),
    bus=rates(finite=5.0 * GB),
)


@st.composite
def sources(draw: st.DrawFn, name: str, kind: str) -> SourceModel:
    changes = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), max_size=3, unique_by=lambda c: c[0]))
    steps = [(0.0, draw(st.integers(0, 3))), *((float(at), count) for at, count in sorted(changes)), (61.0, 1)]
    return SourceModel(
        name, kind, capacity=tuple(steps), devices=draw(st.integers(1, 2)), nodes=draw(st.integers(1, 2)),
        wait_s=draw(seconds), wait_cv=draw(spreads), boot_s=draw(seconds), boot_cv=draw(spreads),
        walltime_s=Duration(draw(st.sampled_from([0.0, 0.0, 150.0]))), max_blocks=draw(st.integers(1, 4)),
        keep_pending=draw(st.integers(1, 3)),
    )  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn) -> World:
    kinds = {
        "fast": DeviceKind(Size(24 * GB), speed=draw(st.sampled_from([1.0, 2.0]))),
        "slow": DeviceKind(Size(16 * GB), speed=0.5),
    }
    pools = [draw(sources("a", "fast")), draw(sources("b", "slow"))][: draw(st.integers(1, 2))]
    contexts = {name: draw(models) for name in "xy"[: draw(st.integers(1, 2))]}
    return World(devices=kinds, sources=tuple(pools), contexts=contexts, links=draw(links), delays=NOW)


arrivals_of = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 3.0, 20.0, 70.0]), st.integers(0, 1), st.integers(1, 4), st.sampled_from([0.0, 2.0]),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


class Crowd(LoadWhereWanted):
    """Load as many libraries of a context as fit on a device, up to three if the context needs no memory."""

    def on_waiting_calls(self, view: View, context: Context) -> list[Action]:
        plan = list(super().on_waiting_calls(view, context))
        if context.recipe.needs.devices > 1:
            return plan
        plan = [action for action in plan if not isinstance(action, Load)]
        needed = context.recipe.needs.device_memory_bytes
        for device in view.devices():
            here = sum(library.context is context for library in device.libraries.values())
            more = min(context.queue.count, device.free_bytes // needed if needed else 3 - here)
            if more > 0 and accepts_device_kind(context, device.facts):
                plan += [Load(RecipeKey(context.recipe.key), device.pilot.id, (device.id,), needed)] * more
        return plan


def crowded(dispatch: Dispatch) -> Policies:
    provisioning = KeepBlocks()
    return Policies(dispatch, Crowd(provisioning=provisioning), provisioning)


TRIED = (*SHIPPED, *BASELINES, "crowd", "crowd, forgetful")


def made(name: str) -> Policies:
    crowds = {"crowd": HottestFirst, "crowd, forgetful": OneCallEach}
    return crowded(crowds[name]()) if name in crowds else policy(name).make()


@given(
    small=worlds(), some=arrivals_of, seed=st.integers(0, 3),
    names=st.lists(st.sampled_from(TRIED), min_size=2, max_size=2, unique=True),
)  # fmt: skip
@settings(max_examples=240, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_policy_finishes_before_the_lower_bound(
    small: World, some: list[tuple[float, int, int, float]], seed: int, names: list[str]
) -> None:
    contexts = list(small.contexts)
    arrivals = [
        Arrival(at, contexts[which % len(contexts)], items=items, fixed_s=fixed_s, items_done=(items + 1) // 2)
        for at, which, items, fixed_s in sorted(some)
    ]
    bound = compute_lower_bound(small, arrivals, seed=seed)
    for name in names:
        policies = made(name)
        run = Simulation(limit_awareness(small, policies.awareness), arrivals, policies, seed=seed)
        outcome = run.run(until_s=600.0)
        if outcome.complete and not outcome.failed:
            assert outcome.ended_at >= bound.ends_at * (1 - 1e-12), f"{name}: {bound}"
