from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from core.toy import Toy
from hypothesis import given
from hypothesis import strategies as st

from stoker.manager.core import story
from stoker.manager.core.nouns import CallState, LibraryState
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.arlo.allocation import LatencyTable, NotEnoughDevicesError, RuntimeDemand, allocate
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.protocol.calls import Objective

SOON = Objective(latency_s=10.0)
LENGTHS = (64, 128, 256)


class Family(Toy):
    """A family of runtimes `r64`, `r128`, `r256` with 1 GB each and calls of 0.25, 0.5 and 1 s. Objective: 10 s."""

    def __init__(
        self, *, load_s: float = 1.0, broken: dict[int, str] | None = None, declares: str = "1 GB",
        longest_declares: str = "", **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(policies=lambda: arlo(provisioning=ExternalPilots(), **settings))
        for tokens in LENGTHS:
            why = (broken or {}).get(tokens, "")
            size = longest_declares if longest_declares and tokens == LENGTHS[-1] else declares
            self.context(
                f"r{tokens}", load_s=load_s, declares=size, broken=why, runs_s=tokens / 256, longest_input=tokens
            )

    def ask(self, *names: str, tokens: int, objective: Objective = SOON, **how: Any) -> Family:
        serving = tuple(f"r{length}" for length in LENGTHS if length >= tokens)
        self.call(*names, context=serving[0], variants=serving[1:], objective=objective, **how)
        return self

    def many(self, count: int, *, tokens: int, name: str = "c", **how: Any) -> Family:
        return self.ask(*(f"{name}{tokens}-{n}" for n in range(count)), tokens=tokens, **how)

    def hot(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for library in self.core.state.libraries.values():
            if library.state is LibraryState.READY:
                found[library.context.recipe.key] = found.get(library.context.recipe.key, 0) + 1
        return found

    def served(self) -> dict[str, int]:
        return {key: context.served for key, context in self.core.state.contexts.items() if context.served}

    def where(self, name: str) -> str:
        return self.core.state.calls[self.ids[name]].holder.context.recipe.key


@pytest.fixture
def family() -> Any:
    made: list[Family] = []

    def make(**settings: Any) -> Family:
        made.append(Family(**settings))
        return made[-1]

    yield make
    for each in made:
        each.check()


def warmed(t: Family, *, devices: int = 4) -> Family:
    """Send calls of all lengths for two minutes, so that every runtime has an instance."""
    t.pilot("p1", devices=devices)
    for second in range(60):
        for tokens in LENGTHS:
            t.ask(f"w{second}-{tokens}", tokens=tokens)
        t.run(until=t.now + 2.0)
    t.run(until=t.now + 200.0)
    return t


# ---- dispatch


def test_calls_go_to_a_larger_runtime_if_the_smallest_is_congested(family: Any) -> None:
    t = warmed(family(), devices=3)
    assert t.hot() == {"r64": 1, "r128": 1, "r256": 1}
    t.many(34, tokens=20)
    assert [t.where(f"c20-{n}") for n in range(34)] == ["r64"] * 34
    t.many(16, tokens=20, name="d")
    assert [t.where(f"d20-{n}") for n in range(16)] == ["r128"] * 16
    t.run()


def test_shortest_runtime_is_used_if_every_level_is_congested(family: Any) -> None:
    t = warmed(family(), devices=3)
    before = len(t.ended)
    t.many(34 + 16 + 7, tokens=20)
    held = {key: sum(t.where(f"c20-{n}") == key for n in range(57)) for key in ("r64", "r128", "r256")}
    assert held == {"r64": 34, "r128": 16, "r256": 7}
    t.many(6, tokens=20, name="last").ask("waits", tokens=20)
    assert [t.where(f"last20-{n}") for n in range(6)] == ["r64"] * 6
    assert t.core.state.calls[t.ids["waits"]].state is CallState.WAITING
    told = story.tell_story(t.core.state, f"c-{t.ids['waits']}")
    assert "libraries of r64 and of longer runtimes run other calls" in told.lines[-2].text
    t.run()
    assert len(t.ended) - before == 57 + 7
    assert all(end.ok for end in t.ended.values())


def test_call_of_a_lost_runtime_is_placed_again(family: Any) -> None:
    t = family(out_of_service=0.5)
    t.pilot("p1")
    t.ask("w1", tokens=256).run()
    t.pilot("p2")
    t.many(6, tokens=20, name="w").run()
    t.run(until=t.now + 30.0)
    homes = {x.context.recipe.key: x.pilot.id for x in t.core.state.libraries.values()}
    assert homes == {"r256": "p1", "r64": "p2"}
    t.many(3, tokens=20)
    assert t.where("c20-0") == "r64"
    t.kill("p2")
    t.run(until=t.now + 4.0)
    assert all(t.ended[f"c20-{n}"].ok for n in range(3))


# ---- residency


def test_first_loads_of_a_new_model_family_cover_all_input_lengths(family: Any) -> None:
    t = family()
    t.pilot("p1", devices=6, memory="40 GB")
    t.ask("first", tokens=20).run(until=t.now + 0.5)
    loads = [library.context.recipe.key for library in t.core.state.libraries.values()]
    assert {key: loads.count(key) for key in loads} == {"r64": 1, "r128": 1, "r256": 4}, "r256 has half of the lengths"
    t.run()


def test_new_model_family_adapts_its_runtimes_within_seconds(family: Any) -> None:
    """The first call fits only the longest runtime. A new family may change most devices at once, without a limit."""
    t = family(out_of_service=0.1)
    t.pilot("p1", devices=10, memory="40 GB")
    t.ask("first", tokens=256).run(until=t.now + 1.5)
    assert t.hot() == {"r256": 10}
    for tick in range(8):
        t.many(15, tokens=20, name=f"t{tick}")
        t.run(until=t.now + 0.5)
    assert t.hot()["r64"] >= 6
    t.run()
    assert all(end.ok for end in t.ended.values())


def test_number_of_devices_out_of_service_is_limited(family: Any) -> None:
    t = family(period_s=20.0, out_of_service=0.2, load_s=3.0)
    t.pilot("p1", devices=10, memory="40 GB")
    t.many(30, tokens=256).run()
    lowest = 10
    for second in range(120):
        t.many(3, tokens=20, name=f"s{second}")
        t.run(until=t.now + 1.0)
        lowest = min(lowest, sum(t.hot().values()))
    assert t.hot().get("r64", 0) >= 4
    assert lowest == 8
    t.run()
    assert all(end.ok for end in t.ended.values())


def test_unmeasured_runtime_replaces_a_runtime_that_fills_a_device(family: Any) -> None:
    t = family(out_of_service=0.5, declares="")
    t.pilot("p1", devices=2, memory="1.5 GB")
    t.ask("first", tokens=256).run()
    for second in range(30):
        t.many(4, tokens=20, name=f"s{second}")
        t.run(until=t.now + 1.0)
    assert t.hot() == {"r256": 1, "r64": 1}
    t.run()


def test_idle_context_leaves_for_a_runtime_without_an_instance(family: Any) -> None:
    t = family(out_of_service=0.5, longest_declares="3 GB")
    t.context("other", load_s=1.0, declares="2.5 GB")
    t.pilot("p1", memory="3 GB")
    t.ask("first", tokens=256).run()
    t.pilot("p2", memory="4 GB")
    for second in range(40):
        t.many(4, tokens=20, name=f"s{second}")
        t.run(until=t.now + 1.0)
    t.call("o", context="other").run()
    assert t.hot() == {"r256": 1, "r64": 1, "other": 1}
    t.kill("p1")
    t.ask("long", tokens=200)
    t.run(until=t.now + 10.0)
    assert t.ended["long"].ok


def test_calls_of_a_runtime_that_fails_to_load_use_other_runtimes(family: Any) -> None:
    t = family(broken={64: "it does not compile"})
    t.pilot("p1", devices=4)
    for second in range(30):
        t.many(2, tokens=20, name=f"s{second}", run_s=0.2)
        t.run(until=t.now + 1.0)
    t.run()
    assert all(end.ok for end in t.ended.values())
    assert "r64" not in t.hot()
    assert t.core.state.contexts["r64"].load_failures == 2


def test_calls_fail_with_the_reason_if_no_runtime_loads(family: Any) -> None:
    t = family(broken=dict.fromkeys(LENGTHS, "it does not compile"))
    t.pilot("p1", devices=4)
    t.ask("a", tokens=20).ask("b", tokens=256).run(limit_s=60.0)
    assert "it does not compile" in t.ended["a"].failure.message
    assert "it does not compile" in t.ended["b"].failure.message


def test_planner_is_idle_without_calls(family: Any) -> None:
    t = warmed(family())
    events = len(t.past)
    t.run(until=t.now + 3600.0)
    assert len(t.past) - events < 5


def demand(requests: float, *, request_s: float, objective_s: float = 0.15) -> RuntimeDemand:
    capacity = max(1, int(objective_s / request_s))
    return RuntimeDemand(requests, capacity, LatencyTable.with_batch_size_one(request_s, capacity=capacity))


def cost_s(instances: Sequence[int], runtimes: Sequence[RuntimeDemand]) -> float:
    """Return the cost of an allocation in seconds (eq. 1); infinity if the longest runtime lacks a needed instance."""
    left = total = 0.0
    for number, (count, runtime) in enumerate(zip(instances, runtimes, strict=True)):
        wanted = left + runtime.requests
        served = wanted if number == len(runtimes) - 1 else min(wanted, count * runtime.capacity)
        left = wanted - served
        if served:
            total += runtime.latency.mean_s(served / count) * served if count else math.inf
    return total


def every(devices: int, runtimes: Sequence[RuntimeDemand]) -> list[tuple[int, ...]]:
    least = [runtime.least_instances for runtime in runtimes]
    least[-1] = max(1, least[-1])
    counts = (range(each, devices + 1) for each in least)
    return [chosen for chosen in itertools.product(*counts) if sum(chosen) == devices]


@st.composite
def curved(draw: st.DrawFn) -> LatencyTable:
    steps = draw(st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.0, 0.05)), min_size=1, max_size=4))
    points = [(1.0, draw(st.floats(0.001, 0.02)))]
    for requests, seconds in steps:
        points.append((points[-1][0] + requests, points[-1][1] + seconds))
    return LatencyTable(tuple(points))


@st.composite
def demands(draw: st.DrawFn) -> list[RuntimeDemand]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        request_s = 0.001 * (number + 1) * draw(st.floats(0.8, 1.3))
        plain = demand(draw(st.floats(0, 300)), request_s=request_s)
        table = draw(st.one_of(st.just(plain.latency), curved()))
        found.append(RuntimeDemand(plain.requests, plain.capacity, table))
    return found


@given(st.integers(1, 9), demands())
def test_plan_has_the_lowest_cost_of_all_allowed_plans(devices: int, runtimes: list[RuntimeDemand]) -> None:
    allowed = every(devices, runtimes)
    if not allowed:
        with pytest.raises(NotEnoughDevicesError):
            allocate(devices, runtimes)
        return
    found = allocate(devices, runtimes)
    assert found.instances in allowed
    assert found.latency_s == pytest.approx(cost_s(found.instances, runtimes))
    assert found.latency_s <= min(cost_s(each, runtimes) for each in allowed) * (1 + 1e-6)


def test_requests_over_the_capacity_of_a_runtime_use_a_longer_runtime() -> None:
    short, long = demand(160, request_s=0.001), demand(0, request_s=0.002)
    assert cost_s((1, 1), [short, long]) == pytest.approx(150 * 0.0755 + 10 * 0.011)
    assert allocate(2, [short, long]).instances == (1, 1)


def test_allocation_error_states_the_number_of_needed_devices() -> None:
    with pytest.raises(NotEnoughDevicesError, match="need 3 devices, but there are only 2") as raised:
        allocate(2, [demand(320, request_s=0.001), demand(0, request_s=0.004)])
    assert raised.value.needed == 3


def test_latency_table_is_linear_between_and_beyond_its_points() -> None:
    table = LatencyTable(((1, 1.0), (3, 2.0), (5, 5.0)))
    assert [table.mean_s(requests) for requests in (0, 1, 2, 3, 4, 5, 7)] == [1, 1, 1.5, 2, 3.5, 5, 8]
    assert (table.is_convex, LatencyTable(((1, 1.0), (2, 3.0), (3, 4.0))).is_convex) == (True, False)
    for points in ((), ((1, 2.0), (1, 3.0)), ((1, 2.0), (2, 1.0))):
        with pytest.raises(ValueError, match="its points must rise"):
            LatencyTable(points)
