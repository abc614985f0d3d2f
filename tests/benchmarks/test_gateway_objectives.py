from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

from benchmarks.serving.gateway_objectives import (
    ACCEPTING,
    MODELS,
    Delayed,
    Outcome,
    Request,
    figures,
    offers_in,
    requests_around,
    requests_at,
    simulated_met,
    table_of,
)
from benchmarks.tables import Verdict
from stoker.contexts.step_times import StepCell, StepTimes
from stoker.manager.live import session_policies
from stoker.manager.policies.named import named
from stoker.protocol.calls import Objective

WANTED = Objective(ttft_s=1.0, tpot_s=0.1)


def test_requests_depend_on_the_seed_and_their_times_on_the_rate() -> None:
    slow, fast = (requests_at(rate, seed=1, for_s=1000.0 / rate) for rate in (1.0, 10.0))
    assert [(each.model, each.prompt, each.output) for each in slow] == [
        (each.model, each.prompt, each.output) for each in fast
    ]
    assert len(slow) == pytest.approx(1000, rel=0.1)
    assert {each.model for each in slow} == set(range(MODELS))
    assert slow != requests_at(1.0, seed=2, for_s=1000.0)


def outcome(tokens: int, *, ttft_s: float, tpot_s: float) -> Outcome:
    return Outcome(200, ttft_s, tpot_s, tokens, [ttft_s + n * tpot_s for n in range(tokens)])


def test_refused_late_and_cut_requests_miss_their_objectives() -> None:
    requests = requests_at(1.0, seed=1, for_s=10.0)[:5]
    whole = [each.output for each in requests]
    outcomes = [
        outcome(whole[0], ttft_s=0.5, tpot_s=0.1), outcome(whole[1], ttft_s=1.5, tpot_s=0.05),
        outcome(whole[2], ttft_s=0.5, tpot_s=0.2), outcome(whole[3] - 1, ttft_s=0.5, tpot_s=0.05), Outcome(503),
    ]  # fmt: skip
    found = figures(requests, outcomes, WANTED)
    assert (found["met"], found["statuses"]) == (20.0, {"200": 4, "503": 1})


def test_replay_has_the_accepted_requests_around_a_refused_one() -> None:
    requests = requests_at(1.0, seed=1, for_s=60.0)
    accepted = [number % 2 == 0 for number in range(len(requests))]
    some = requests_around(requests, accepted, 21, after_s=3.0)
    assert 21 in some
    assert all(accepted[number] for number in some if number != 21)
    assert all(-4.0 <= requests[number].at_s - requests[21].at_s <= 3.0 for number in some)
    assert len(some) > 2


def test_simulated_requests_meet_feasible_objectives() -> None:
    steps = tuple(StepCell(2.0**power, 64.0, 0.010) for power in range(8))
    delayed = Delayed(StepTimes(steps, steps), load_s=1.0, message_s=0.001)
    requests = [Request(1.0 * number, number % MODELS, "x" * 32, 40) for number in range(12)]
    shares = [
        simulated_met(requests, delayed, Objective(ttft_s=0.1, tpot_s=tpot_s), named(policy).make())
        for policy in ("slinfer", "default")
        for tpot_s in (0.015, 0.005)
    ]
    assert shares == [100.0, 0.0, 100.0, 0.0]


@pytest.mark.parametrize("seed", [1, 2])
def test_short_answers_are_not_refused_for_long_rounds(seed: int) -> None:
    """Decode steps of two models together exceed the time per token, but all answers end before they are late."""
    decode = tuple(StepCell(2.0**power, 64.0, 0.0045 + 0.00015 * 2**power) for power in range(6))
    prefill = tuple(StepCell(2.0**power, 2.0**power / 2, 0.0045 + 0.00005 * 2**power) for power in range(10))
    requests = requests_at(16.0, seed=seed, for_s=10.0)
    for policy in ("slinfer", "default"):
        met = simulated_met(
            requests, Delayed(StepTimes(prefill, decode), load_s=0.4, message_s=0.002),
            Objective(ttft_s=0.13, tpot_s=0.0107), named(policy).make(),
        )  # fmt: skip
        assert met == 100.0, policy


def test_refused_offers_of_all_models_are_summed_by_case() -> None:
    family = CounterMetricFamily("stoker_refused_offers", "Offers", labels=["model_name", "case"])
    for model, case, count in (("a", "memory", 1), ("a", "decode-round", 2), ("b", "decode-round", 3)):
        family.add_metric([model, case], count)
    registry = CollectorRegistry()
    registry.register(type("Offers", (), {"collect": lambda self: [family]})())
    assert offers_in(generate_latest(registry).decode()) == {"memory": 1, "decode-round": 5}


def test_policy_of_the_replays_can_be_created() -> None:
    assert session_policies.find(ACCEPTING).make().dispatch


def run_of(ours: float, theirs: float, *, late: int) -> dict[str, Any]:
    side = {"statuses": {}, "offers": {}, "ttft_p50_s": 0.1, "tpot_p50_s": 0.01, "rehearsed": 5.0}
    side["simulated"] = ours - 4.0
    return {
        "seed": 1, "requests": 100, "capacity": 5.0, "ttft_s": 1.0, "tpot_s": 0.1, "load": [1.0],
        "delays": {"message_s": 0.001, "load_s": 2.0},
        "slinfer": {**side, "met": ours}, "default": {**side, "met": theirs},
        "replays": {"refused": {"late": late, "harm": 1, "of": 10}, "accepted": {"late": 1, "harm": 0, "of": 10}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "late", "expected"), [((90, 80, 70), 9, (True, True)), ((90, 80, 50), 8, (False, False))]
)
def test_single_seed_with_fewer_met_objectives_misses_the_bar(
    ours: tuple[int, ...], late: int, expected: tuple[bool, bool]
) -> None:
    table = table_of([run_of(each, 60.0, late=late) for each in ours])
    verdicts = [line.verdict() for line in table.lines if line.bar is not None]
    assert verdicts == [Verdict.MET if met else Verdict.MISSED for met in (expected[0], True, expected[1])]
