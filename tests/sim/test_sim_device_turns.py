"""Libraries that share a simulated device compute a step at a time, in the order that every pilot's core gives."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from sim.engines import SLINFER, engine, one_world, requests, served, step_times
from sim.test_sim_engine import rows, values
from sim.worlds import simulate

from stoker.contexts.step_times import StepSeconds
from stoker.manager.sim.client import NO_OBJECTIVE, Arrival
from stoker.manager.sim.log import Happened, TokenTimes
from stoker.manager.sim.virtual_engine import VirtualEngine
from stoker.manager.sim.world import World
from stoker.pilot.core.turns import PATIENCE_S, TurnRequest, next_turns
from stoker.protocol.calls import Objective
from stoker.protocol.ids import DeviceId, LibraryId

NAMES = ("llm", "other", "third")


def shared(count: int) -> World:
    """So many contexts, of which one GPU holds all."""
    return replace(one_world(served()), contexts={name: served() for name in NAMES[:count]})


def together(*streams: list[Arrival]) -> list[Arrival]:
    return sorted((each for stream in streams for each in stream), key=lambda each: each.at_s)


def turn_by_turn(arrivals: list[Arrival], contexts: int) -> list[TokenTimes]:
    """The tokens of requests to engines that share a device from the beginning on, each step decided by itself."""
    model = engine()
    engines = [VirtualEngine(StepSeconds(step_times()), model.limits(0)) for _ in range(contexts)]
    times = [
        TokenTimes(each.at_s, each.prompt, each.written, each.at_s + (each.objective.first_token_s(each.prompt)
                   or math.inf), each.objective.tpot_s)
        for each in arrivals
    ]  # fmt: skip
    coming, now, since = list(range(len(arrivals)))[::-1], 0.0, [math.nan] * contexts

    def come(until_s: float) -> None:
        while coming and arrivals[coming[-1]].at_s <= until_s:
            number = coming.pop()
            place = NAMES.index(arrivals[number].context)
            if not len(engines[place]):
                since[place] = arrivals[number].at_s
            engines[place].add(number, times[number], now=arrivals[number].at_s)

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
        [place] = next_turns(asked, ())
        engines[place].begin(now)
        now = engines[place].ends_at
        come(now)  # they join behind the step that is computed
        engines[place].end(now)
        since[place] = now
    return times


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("contexts", [2, 3])
def test_engines_take_turns_as_the_core_says(contexts: int, seed: int) -> None:
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
    ttft, late = values(run.log, Happened.TOKEN_FIRST), values(run.log, Happened.TOKEN_LATE)
    calls = range(len(first), outcome.calls)
    assert [ttft[call] for call in calls] == pytest.approx([one.ttft_s for one in expected], abs=1e-4)
    assert [late[call] for call in calls] == pytest.approx([one.late_s for one in expected], abs=1e-4)


def test_a_device_computes_for_one_engine_at_a_time() -> None:
    alone = requests(20, from_s=40.0, every_s=0.5)
    both = together(alone, requests(20, seed=2, from_s=40.0, every_s=0.5, context="other"))
    busy = [simulate(shared(2), arrivals)[1].busy_s for arrivals in (alone, both)]
    assert 1.5 * busy[0] < busy[1] < 2.5 * busy[0]  # smaller batches, but no step beside another


def test_who_is_waited_for_comes_first() -> None:
    """A library with a long batch of nobody's, and requests that are due: they hardly notice it."""
    idle = [
        Arrival(60.0, "other", input_length=16, output=2000, objective=NO_OBJECTIVE) for _ in range(8)
    ]  # fmt: skip
    urgent = requests(10, from_s=60.0, every_s=3.0)
    first = Arrival(0.0, "other", input_length=8, output=1)
    late = [
        max(values(simulate(shared(2), together([first], urgent, more))[0].log, Happened.TOKEN_LATE).values())
        for more in ([], idle)
    ]
    assert late[0] < late[1] < late[0] + 0.5
    assert late[1] < 0


def test_a_library_that_is_hopelessly_late_starves_nobody() -> None:
    hopeless = Objective(ttft_s=0.001, tpot_s=0.001)
    greedy = [Arrival(60.0, "llm", input_length=16, output=3000, objective=hopeless) for _ in range(4)]
    first = [Arrival(0.0, name, input_length=8, output=1) for name in NAMES[:2]]
    patient = [Arrival(61.0, "other", input_length=16, output=4)]
    run, _ = simulate(shared(2), [*first, *greedy, *patient])
    ended = {call: at_s for at_s, call, _ in rows(run.log, Happened.CALL_ENDED)}
    assert ended[6] < 61.0 + 4 * (PATIENCE_S + 0.1) < ended[2]


def test_a_library_that_goes_leaves_the_device_to_the_others() -> None:
    """A context is unloaded, or dies, while another one waits for its turn: the pilot goes on."""
    arrivals = together(
        requests(30, from_s=40.0, every_s=0.1), requests(30, seed=2, from_s=40.0, every_s=0.1, context="other")
    )
    world = replace(shared(2), sources=(replace(one_world(served(), [(0.0, 2), (45.0, 1)]).sources[0]),))
    run, outcome = simulate(world, arrivals)
    assert (outcome.calls, outcome.failed, outcome.lost_pilots) == (62, {}, 1)
    assert simulate(world, arrivals)[0].log.digest() == run.log.digest()
    assert SLINFER.tpot_s == 0.25
