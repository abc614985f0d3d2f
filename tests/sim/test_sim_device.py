"""What a device computes, shared by the calls that run on it, against answers that are known by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.worlds import calls, model, simulate, source, world

from stoker.manager.core.seams import Load, Policies
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.sim.agenda import Agenda
from stoker.manager.sim.device import RunningWork, SimulatedDevice
from stoker.manager.sim.log import Happened
from stoker.manager.sim.run import Simulation
from stoker.manager.study.measures import figures_of, measure
from stoker.protocol.ids import RecipeKey

GB = 1_000_000_000


class Clock:
    """A device, and when what ran on it had ended."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.device = SimulatedDevice(self.agenda)
        self.works: dict[str, RunningWork] = {}
        self.ended: dict[str, float] = {}
        self.ran: dict[str, float] = {}

    def begin(self, name: str, seconds: float, *, part: float = 1.0, at: float = 0.0) -> None:
        def ends(which: str) -> None:
            self.ended[which] = self.agenda.now
            self.ran[which] = self.device.done(self.works[which])

        def begins() -> None:
            self.works[name] = self.device.begin(seconds, part=part, then=ends, args=(name,))

        self.agenda.at(at, begins)

    def run(self) -> dict[str, float]:
        while self.agenda.step():
            pass
        return self.ended


def test_one_alone_takes_its_time() -> None:
    clock = Clock()
    clock.begin("a", 10.0)
    clock.begin("b", 10.0, at=10.0)
    assert clock.run() == {"a": 10.0, "b": 20.0}


def test_a_device_is_busy_while_at_least_one_runs() -> None:
    clock = Clock()
    clock.begin("a", 10.0)
    clock.begin("b", 10.0, at=5.0)
    clock.begin("c", 4.0, at=30.0)
    clock.agenda.at(32.0, lambda: busy.append(clock.device.busy_s(32.0)))
    busy: list[float] = []
    clock.run()
    assert [*busy, clock.device.busy_s(40.0)] == pytest.approx([22.0, 24.0])


@pytest.mark.parametrize("pool", [1, [(0.0, 1), (20.0, 0), (40.0, 1)]], ids=["stays", "lost"])
def test_no_device_is_busy_for_longer_than_it_is_held(pool: int | list[tuple[float, int]]) -> None:
    simulation, outcome = simulate(world(source(pool), model(slots=4)), calls(100))
    measured = measure(simulation.log, until_s=outcome.ended_at)
    assert measured.useful_s == pytest.approx(100.0)  # four at a time
    assert outcome.busy_s == pytest.approx(25.0, abs=1.0)
    assert figures_of(simulation.log, outcome, measured).busy == pytest.approx(outcome.busy_s / measured.held_s)
    assert outcome.busy_s < measured.held_s


def test_two_at_once_take_twice_as_long() -> None:
    clock = Clock()
    clock.begin("a", 10.0)
    clock.begin("b", 10.0)
    assert clock.run() == pytest.approx({"a": 20.0, "b": 20.0})
    assert clock.ran == pytest.approx({"a": 20.0, "b": 20.0})


def test_one_that_comes_later_slows_the_first_from_then_on() -> None:
    clock = Clock()
    clock.begin("a", 10.0)
    clock.begin("b", 10.0, at=5.0)
    assert clock.run() == pytest.approx({"a": 15.0, "b": 20.0})
    assert clock.ran == pytest.approx({"a": 15.0, "b": 15.0})


def test_calls_that_want_a_part_of_it_are_slowed_only_where_that_is_more_than_all() -> None:
    clock = Clock()
    for name in "abc":
        clock.begin(name, 10.0, part=1 / 3)
    clock.begin("whole", 10.0, at=20.0)
    clock.begin("half", 10.0, part=0.5, at=20.0)
    assert clock.run() == pytest.approx({"a": 10.0, "b": 10.0, "c": 10.0, "whole": 35.0, "half": 35.0})


def test_what_is_stopped_says_how_much_of_it_was_done_and_leaves_its_part_to_the_others() -> None:
    clock, parts = Clock(), []
    clock.begin("a", 10.0)
    clock.begin("b", 10.0)
    clock.agenda.at(8.0, lambda: parts.append(clock.device.stop(clock.works["b"])))
    assert clock.run() == pytest.approx({"a": 14.0})
    assert parts == [pytest.approx(0.4)]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 20.0), st.floats(0.1, 9.0), st.sampled_from([1.0, 0.5, 1 / 3])), min_size=1, max_size=9
    )
)
def test_it_never_computes_more_than_all_of_the_time_and_nobody_is_quicker_than_alone(
    some: list[tuple[float, float, float]],
) -> None:
    clock = Clock()
    for number, (at, seconds, part) in enumerate(some):
        clock.begin(str(number), seconds, part=part, at=at)
    ended = clock.run()
    assert len(ended) == len(some)
    for at, seconds, _ in some:
        assert max(ended.values()) - at >= seconds - 1e-5
    begins = min(round(at, 6) for at, _, _ in some)
    assert sum(seconds * part for _, seconds, part in some) <= max(ended.values()) - begins + 1e-5
    for number, (at, seconds, _) in enumerate(some):
        assert ended[str(number)] - at >= seconds - 1e-5


class Twice(LoadWhereWanted):
    """Two libraries of a context on a device; each is promised so much."""

    def __init__(self, *, promise: int, provisioning: KeepBlocks) -> None:
        super().__init__(provisioning=provisioning)
        self.promise = promise

    def wanted(self, view, context):  # type: ignore[no-untyped-def]
        load = [
            Load(RecipeKey(context.recipe.key), device.pilot.id, (device.id,), self.promise)
            for device in view.devices()
            if not device.libraries
        ]
        return 2 * load


def twice(*, promise: int) -> Policies:
    provisioning = KeepBlocks()
    return Policies(HottestFirst(), Twice(promise=promise, provisioning=provisioning), provisioning)


@pytest.mark.parametrize("slots", [1, 2])
def test_two_libraries_of_a_device_are_no_faster_than_one(slots: int) -> None:
    run = Simulation(world(source(1), model(slots=slots)), calls(40), twice(promise=8 * GB))
    assert run.run().ended_at == pytest.approx(10.0 + 40.0 / slots)
    assert list(run.log.what).count(Happened.LIBRARY_READY) == 2


def test_a_library_that_was_promised_less_than_it_takes_runs_out_of_memory() -> None:
    outcome = Simulation(world(source(1), model()), calls(3), twice(promise=GB)).run()
    [(why, count)] = outcome.failed.items()
    assert count == 3
    assert "ran out of memory: 8.0 GB of device memory are needed, 1.0 GB were promised" in why
