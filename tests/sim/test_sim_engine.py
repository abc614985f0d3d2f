"""In libraries with an engine, calls join one batch and end by the rules of the engine."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from msgspec.structs import replace
from sim.engines import LOADED_S, SLINFER, engine, one_world, requests, served, step_times
from sim.worlds import model, simulate, source, world

from stoker.errors import ConfigError
from stoker.manager.core.seams import Policies
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted, default_policies
from stoker.manager.sim.batch_run import TimedRequest, batch_run
from stoker.manager.sim.bound import compute_lower_bound
from stoker.manager.sim.check import check_arrivals, raise_for_impossible_setting
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, DeviceKind
from stoker.protocol.calls import Features
from stoker.site import Duration, Size

CUT_S = 36.0
"""Time in seconds at which one of two blocks is lost."""


def rows(log: EventLog, what: LoggedEvent) -> list[tuple[float, int, float]]:
    found = zip(log.at_s, log.what, log.call, log.value, strict=True)
    return [(at_s, call, value) for at_s, each, call, value in found if each == what]


def values(log: EventLog, what: LoggedEvent) -> dict[int, float]:
    return {call: value for _, call, value in rows(log, what)}


def in_batch(arrivals: list[Arrival]) -> list[TimedRequest]:
    found = []
    for each in arrivals:
        due_at = each.at_s + each.objective.first_token_s(each.prompt_tokens)
        at_s, tpot_s = max(LOADED_S, each.at_s), each.objective.tpot_s
        found.append(TimedRequest(at_s, each.prompt_tokens, each.output_tokens, due_at, tpot_s))
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("limits", "every_s"),
    [({}, 0.5), ({"prefill_tokens": 64}, 0.2), ({"cache_tokens": 4096}, 0.3), ({"mixes": True}, 0.3)],
)
def test_library_serves_its_calls_like_its_engine(limits: dict[str, int], every_s: float, seed: int) -> None:
    arrivals, model = requests(80, seed=seed, every_s=every_s), engine(**limits)
    run, outcome = simulate(one_world(served(model)), arrivals)
    assert (outcome.calls, outcome.failed) == (81, {})
    ended = {call: at_s for at_s, call, _ in rows(run.log, LoggedEvent.CALL_ENDED)}
    first = values(run.log, LoggedEvent.TOKEN_FIRST)
    expected = batch_run(model.times, model.make_batch_limits(0), in_batch(arrivals))
    calls = sorted(ended)  # calls are numbered in order of arrival
    assert [ended[call] for call in calls] == pytest.approx([end.ended_at for end in expected], abs=2e-6)
    firsts = [at.at_s + first[call] for at, call in zip(arrivals, calls, strict=True)]
    assert firsts == pytest.approx([end.first_at for end in expected], abs=2e-6)


def test_preempted_library_loses_its_batch_and_its_calls_run_again() -> None:
    arrivals = requests(60, every_s=0.1, output=200)
    two = one_world(served(engine(rows=8), slots=8), [(0.0, 2), (CUT_S, 1)], keep_pending=2)
    run, outcome = simulate(two, arrivals)
    left = {call for _, call, _ in rows(run.log, LoggedEvent.CALL_LEFT)}
    assert outcome.lost_pilots == 1
    assert outcome.rerun_calls == len(left) > 0
    assert (outcome.calls, outcome.failed) == (61, {})
    assert set(Counter(call for _, call, _ in rows(run.log, LoggedEvent.CALL_ENDED)).values()) == {1}
    began = Counter(call for _, call, _ in rows(run.log, LoggedEvent.CALL_BEGAN))
    assert {call for call, times in began.items() if times == 2} == left
    # The program has all pieces of the ended library, so the next piece comes after the second prefill.
    gaps, first = values(run.log, LoggedEvent.TOKEN_GAP), values(run.log, LoggedEvent.TOKEN_FIRST)
    interrupted = [call for call in left if first[call] + arrivals[call].at_s < CUT_S]
    assert interrupted
    assert all(gaps[call] > 0.1 for call in interrupted)


class SeesFeatures(HottestFirst):
    """A dispatch policy that records the features of placed calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Features] = []

    def place(self, view, call):
        self.seen.append(call.spec.features)
        return super().place(view, call)


def test_policies_do_not_know_the_number_of_output_tokens() -> None:
    dispatch = SeesFeatures()
    policies = Policies(provisioning=KeepBlocks(), residency=LoadWhereWanted(), dispatch=dispatch)
    arrivals = [Arrival(30.0 * number, "llm", input_length=9, output=10 + number) for number in range(5)]
    Simulation(one_world(served()), arrivals, policies).run()
    told = {each.expected_output for each in dispatch.seen}
    means = {0, 10, round(10.5), 11, round(11.5)}  # mean output lengths of the calls that ended earlier
    assert told == means
    assert {each.input_length for each in dispatch.seen} == {9}


def test_first_token_limit_grows_with_the_input_up_to_a_maximum() -> None:
    assert [SLINFER.first_token_s(length) for length in (1, 256, 1024, 100_000)] == [0.5, 0.5, 2.0, 8.0]
    arrivals = [
        Arrival(0.0, "llm", input_length=8, output=1),
        Arrival(20.0, "llm", input_length=1024, output=2, objective=SLINFER),  # the prompt is read in 1.024 s
        Arrival(30.0, "llm", input_length=1024, output=2, objective=replace(SLINFER, ttft_most_s=1.0)),
    ]
    run, _ = simulate(one_world(served(engine(prefill_tokens=2048))), arrivals)
    late = [value for _, _, value in rows(run.log, LoggedEvent.TOKEN_LATE)]
    assert late == pytest.approx([1.024 - 2.0, 1.024 - 1.0])


def test_prompt_too_long_for_every_cache_fails_its_call_alone() -> None:
    arrivals = [Arrival(0.0, "llm", input_length=n, output=10, objective=SLINFER) for n in (100, 5000, 100)]
    run, outcome = simulate(one_world(served(engine(cache_tokens=1024))), arrivals)
    assert (outcome.calls, outcome.items, outcome.failed) == (3, 2, {"exception": 1})
    assert sorted(values(run.log, LoggedEvent.TOKEN_LATE).values())[-1] == math.inf


def test_manager_receives_the_size_of_a_batch() -> None:
    arrivals = [Arrival(0.0, "llm", input_length=16, output=4000) for _ in range(3)]
    run, outcome = simulate(one_world(served()), arrivals, until_s=LOADED_S + 25.0)
    [library] = run.core.state.libraries.values()
    assert (library.batch.running, library.batch.waiting, library.batch.rows) == (3, 0, 64)
    assert library.batch.mean_rows_per_decode_step == 3.0
    assert library.batch_at == pytest.approx(LOADED_S + 20.0, abs=0.1)
    assert outcome.engine_steps > library.batch.steps > 1000
    assert outcome.mean_batch == 3.0
    assert outcome.busy_s == pytest.approx(25.0)


def test_calls_of_other_contexts_on_the_device_slow_its_steps_down() -> None:
    plain = replace(model(item_s=5.0), load_s={"": Duration(0.0)})
    both = replace(world(source(1), served()), contexts={"llm": served(), "plain": plain})
    arrivals = [
        Arrival(0.0, "llm", input_length=8, output=1),
        Arrival(20.0, "llm", input_length=16, output=401),
        Arrival(22.0, "plain", items=1),
    ]
    run, _ = simulate(both, arrivals)
    alone_s = 0.016 + sum(0.011 + 1e-6 * length for length in range(17, 417))
    ended = [at_s for at_s, _, _ in rows(run.log, LoggedEvent.CALL_ENDED)]
    left_s = 20.0 + alone_s - 22.0
    # the first call has half of the device after the start of the second call
    assert ended[1] == pytest.approx(22.0 + 2 * left_s, abs=0.05)
    assert ended[2] == pytest.approx(22.0 + 5.0 + left_s, abs=0.05)


def test_context_without_set_slots_uses_the_slots_of_its_library() -> None:
    _, outcome = simulate(world(source(1), replace(model(), slots=0)), [Arrival(0.0, "llm") for _ in range(5)])
    assert outcome.ended_at == pytest.approx(10.0 + 5.0)  # without an engine a library runs one call at a time
    assert compute_lower_bound(
        world(source(1), replace(model(), slots=0)), [Arrival(0.0, "llm")] * 5
    ).ends_at == pytest.approx(15.0, abs=1e-3)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "context",
    [served(), served(engine(rows=4)), served(engine(cache_tokens=2048), slots=3), served(engine(mixes=True))],
)
def test_no_run_with_an_engine_ends_before_the_lower_bound(context: ContextModel, seed: int) -> None:
    arrivals = requests(40, seed=seed, from_s=0.0, every_s=0.02)
    bound = compute_lower_bound(one_world(context, 2), arrivals)
    _, outcome = simulate(one_world(context, 2), arrivals)
    assert bound.ends_at <= outcome.ended_at


def test_lower_bound_is_near_the_time_of_a_single_long_request() -> None:
    arrivals = [Arrival(0.0, "llm", input_length=1, output=1001)]
    bound, (_, outcome) = compute_lower_bound(one_world(served()), arrivals), simulate(one_world(served()), arrivals)
    assert 0.9 * outcome.ended_at < bound.ends_at <= outcome.ended_at


def test_impossible_engine_settings_are_refused() -> None:
    wrong = replace(one_world(served()), contexts={"llm": served().__class__(engine={"tpu": engine()})})
    with pytest.raises(ConfigError, match="'tpu', which is not a device"):
        raise_for_impossible_setting(wrong, wanted=["llm"])
    cpu = replace(wrong.sources[0], name="nodes", kind="cpu")
    some = replace(
        wrong, devices={**wrong.devices, "cpu": DeviceKind(Size(24_000_000_000))}, sources=(*wrong.sources, cpu),
        contexts={"llm": served().__class__(engine={"gpu": engine()})},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="may be on 'cpu', whose step times are not known"):
        raise_for_impossible_setting(some, wanted=["llm"])
    with pytest.raises(ConfigError, match="such a call is one request"):
        list(check_arrivals(one_world(served()), [Arrival(0.0, "llm", items=2)]))
    with pytest.raises(ValueError, match="item: the step times of its engine set"):
        ContextModel(engine={"": engine()}, item_s={"": Duration(1.0)})
    with pytest.raises(ValueError, match="an engine needs prefill and decode"):
        engine().__class__(replace(step_times(), decode=()))
    short = one_world(served(), walltime_s=Duration(60.0))
    with pytest.raises(ConfigError, match=r"can never end: 10000 tokens take"):
        list(check_arrivals(short, [Arrival(0.0, "llm", input_length=5, output=10_000)]))


def test_counted_log_groups_token_times_within_about_one_percent() -> None:
    arrivals = requests(50, every_s=0.1)
    each, _ = simulate(one_world(served()), arrivals)
    counted = Simulation(one_world(served()), arrivals, default_policies(), counted=True)
    counted.run()
    for what in (LoggedEvent.TOKEN_FIRST, LoggedEvent.TOKEN_MEAN, LoggedEvent.TOKEN_GAP):
        exact = sorted(values(each.log, what).values())
        classes = sorted(value for _, count, value in rows(counted.log, what) for _ in range(count))
        assert classes == pytest.approx(exact, rel=0.011)
    met = sum(value <= 0 for value in values(each.log, LoggedEvent.TOKEN_LATE).values())
    assert {value <= 0: count for _, count, value in rows(counted.log, LoggedEvent.TOKEN_LATE)}.get(True, 0) == met
