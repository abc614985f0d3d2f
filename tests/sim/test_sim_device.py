from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sim.engines import SLINFER, engine, one_world, requests, served, step_times
from sim.test_sim_engine import rows, values
from sim.worlds import calls, model, simulate, source, world

from stoker.contexts.step_times import StepSeconds
from stoker.manager.core.seams import Load, Policies
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.sim.agenda import Agenda
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.device import DeviceWork, SimulatedDevice, begin_work
from stoker.manager.sim.log import LoggedEvent, TokenTimes
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.virtual_engine import VirtualEngine
from stoker.manager.sim.world import World
from stoker.manager.study.measures import compute_run_figures, measure_run
from stoker.pilot.core.turns import MAX_HEADROOM_S, TurnRequest, choose_next_turns
from stoker.protocol.calls import Objective
from stoker.protocol.ids import DeviceId, LibraryId, RecipeKey

GB = 1_000_000_000


class Clock:
    """A simulated device that records the end time of each call."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.device = SimulatedDevice(self.agenda)
        self.works: dict[str, DeviceWork] = {}
        self.ended: dict[str, float] = {}
        self.ran: dict[str, float] = {}

    def begin(self, name: str, seconds: float, *, part: float = 1.0, at: float = 0.0) -> None:
        def ends(which: str) -> None:
            self.ended[which] = self.agenda.now
            self.ran[which] = self.device.finish_work(self.works[which])

        def begins() -> None:
            self.works[name] = begin_work((self.device,), seconds, part=part, then=ends, args=(name,))

        self.agenda.schedule_at(at, begins)

    def run(self) -> dict[str, float]:
        while self.agenda.run_entries(1):
            pass
        return self.ended


@pytest.mark.parametrize(
    ("works", "ended", "ran"),
    [
        ([(10.0, 1.0, 0.0), (10.0, 1.0, 10.0)], [10.0, 20.0], [10.0, 10.0]),
        ([(10.0, 1.0, 0.0), (10.0, 1.0, 0.0)], [20.0, 20.0], [20.0, 20.0]),
        ([(10.0, 1.0, 0.0), (10.0, 1.0, 5.0)], [15.0, 20.0], [15.0, 15.0]),
        ([(10.0, 1 / 3, 0.0)] * 3, [10.0] * 3, [10.0] * 3),
        ([(10.0, 1.0, 20.0), (10.0, 0.5, 20.0)], [35.0, 35.0], [15.0, 15.0]),
    ],
    ids=["one after the other", "together", "one comes later", "parts that fit", "parts that do not fit"],
)
def test_calls_slow_down_only_if_they_exceed_the_device(
    works: list[tuple[float, float, float]], ended: list[float], ran: list[float]
) -> None:
    clock = Clock()
    for number, (seconds, part, at) in enumerate(works):
        clock.begin(str(number), seconds, part=part, at=at)
    clock.run()
    for found, expected in ((clock.ended, ended), (clock.ran, ran)):
        assert [found[str(number)] for number in range(len(works))] == pytest.approx(expected)


@pytest.mark.parametrize("pool", [1, [(0.0, 1), (20.0, 0), (40.0, 1)]], ids=["stays", "lost"])
def test_busy_time_of_a_device_never_exceeds_its_held_time(pool: int | list[tuple[float, int]]) -> None:
    simulation, outcome = simulate(world(source(pool), model(slots=4)), calls(100))
    measured = measure_run(simulation.log, until_s=outcome.ended_at)
    assert measured.useful_s == pytest.approx(100.0)  # four calls run at a time
    assert outcome.busy_s == pytest.approx(25.0, abs=1.0)
    assert compute_run_figures(simulation.log, outcome, measured).busy == pytest.approx(
        outcome.busy_s / measured.held_s
    )
    assert outcome.busy_s < measured.held_s


def test_stopped_work_returns_its_finished_part_and_frees_capacity() -> None:
    clock, parts = Clock(), []
    clock.begin("a", 10.0)
    clock.begin("b", 10.0)
    clock.agenda.schedule_at(8.0, lambda: parts.append(clock.device.stop_work(clock.works["b"])))
    assert clock.run() == pytest.approx({"a": 14.0})
    assert parts == [pytest.approx(0.4)]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 20.0), st.floats(0.1, 9.0), st.sampled_from([1.0, 0.5, 1 / 3])), min_size=1, max_size=9
    )
)
def test_device_is_never_overused_and_no_call_is_faster_than_alone(some: list[tuple[float, float, float]]) -> None:
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
    """Load two libraries of a context on a device; the core reserves `promise` bytes for each library."""

    def __init__(self, *, promise: int, provisioning: KeepBlocks) -> None:
        super().__init__(provisioning=provisioning)
        self.promise = promise

    def on_waiting_calls(self, view, context):
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
    assert list(run.log.what).count(LoggedEvent.LIBRARY_READY) == 2


def test_library_promised_less_than_it_uses_runs_out_of_memory() -> None:
    outcome = Simulation(world(source(1), model()), calls(3), twice(promise=GB)).run()
    [(why, count)] = outcome.failed.items()
    assert count == 3
    assert "ran out of memory: 8.0 GB of device memory are needed, 1.0 GB were promised" in why


NAMES = ("llm", "other", "third")


def shared(count: int) -> World:
    return replace(one_world(served()), contexts={name: served() for name in NAMES[:count]})


def together(*streams: list[Arrival]) -> list[Arrival]:
    return sorted((each for stream in streams for each in stream), key=lambda each: each.at_s)


def turn_by_turn(arrivals: list[Arrival], contexts: int) -> list[TokenTimes]:
    """Return the token times of engines that share a device, computed step by step."""
    model = engine()
    engines = [VirtualEngine(StepSeconds(step_times()), model.make_batch_limits(0)) for _ in range(contexts)]
    times = [
        TokenTimes(each.at_s, each.prompt_tokens, each.output_tokens,
                   each.at_s + (each.objective.first_token_s(each.prompt_tokens) or math.inf), each.objective.tpot_s)
        for each in arrivals
    ]  # fmt: skip
    coming, now, since = list(range(len(arrivals)))[::-1], 0.0, [math.nan] * contexts

    def come(until_s: float) -> None:
        while coming and arrivals[coming[-1]].at_s <= until_s:
            number = coming.pop()
            place = NAMES.index(arrivals[number].context)
            if not len(engines[place]):
                since[place] = arrivals[number].at_s
            engines[place].add_request(number, times[number], now=arrivals[number].at_s)

    while any(one.seen < one.output for one in times):
        come(now)
        asked = [
            TurnRequest(LibraryId(place), (DeviceId("gpu:0"),), one.due_at, since[place])
            for place, one in enumerate(engines)
            if len(one)
        ]
        if not asked:
            now = arrivals[coming[-1]].at_s
            continue
        [place] = choose_next_turns(asked, ())
        engines[place].begin_steps(now)
        now = engines[place].ends_at
        come(now)  # requests that arrived during this step join the next step
        engines[place].end_steps(now)
        since[place] = now
    return times


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("contexts", [2, 3])
def test_simulated_engines_take_turns_like_real_engines(contexts: int, seed: int) -> None:
    names = NAMES[:contexts]
    first = [Arrival(0.0, name, input_length=8, output=1) for name in names]
    streams = [
        requests(25, seed=10 * seed + place, from_s=60.0, every_s=1.0, context=name)[1:]
        for place, name in enumerate(names)
    ]
    later = together(*streams)
    run, outcome = simulate(shared(contexts), [*first, *later])
    assert outcome.lost_pilots == 0
    assert outcome.calls == len(first) + len(later)
    expected = turn_by_turn([*first, *later], contexts)[len(first) :]
    ttft, late = values(run.log, LoggedEvent.TOKEN_FIRST), values(run.log, LoggedEvent.TOKEN_LATE)
    calls = range(len(first), outcome.calls)
    assert [ttft[call] for call in calls] == pytest.approx([one.ttft_s for one in expected], abs=1e-4)
    assert [late[call] for call in calls] == pytest.approx([one.late_s for one in expected], abs=1e-4)


def test_hopelessly_late_library_starves_no_other() -> None:
    hopeless = Objective(ttft_s=0.001, tpot_s=0.001)
    greedy = [Arrival(60.0, "llm", input_length=16, output=3000, objective=hopeless) for _ in range(4)]
    first = [Arrival(0.0, name, input_length=8, output=1) for name in NAMES[:2]]
    patient = [Arrival(61.0, "other", input_length=16, output=4)]
    run, _ = simulate(shared(2), [*first, *greedy, *patient])
    ended = {call: at_s for at_s, call, _ in rows(run.log, LoggedEvent.CALL_ENDED)}
    assert ended[6] < 61.0 + 4 * (MAX_HEADROOM_S + 0.1) < ended[2]


def test_ended_library_leaves_the_device_to_the_others() -> None:
    arrivals = together(
        requests(30, from_s=40.0, every_s=0.1), requests(30, seed=2, from_s=40.0, every_s=0.1, context="other")
    )
    world = replace(shared(2), sources=(replace(one_world(served(), [(0.0, 2), (45.0, 1)]).sources[0]),))
    run, outcome = simulate(world, arrivals)
    assert (outcome.calls, outcome.failed, outcome.lost_pilots) == (62, {}, 1)
    assert simulate(world, arrivals)[0].log.digest() == run.log.digest()
    assert SLINFER.tpot_s == 0.25
