from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")


from benchmarks.serving.gateway_objectives import MODELS, Outcome, Wanted, figures, requests_at
from benchmarks.serving.gateway_objectives_world import Delayed, Length, simulated_met
from stoker.contexts.step_times import StepCell, StepTimes
from stoker.manager.policies.named import named
from stoker.protocol.calls import Objective

WANTED = Wanted(ttft_s=1.0, tpot_s=0.1)


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


def test_simulated_requests_meet_feasible_objectives() -> None:
    steps = tuple(StepCell(2.0**power, 64.0, 0.010) for power in range(8))
    delayed = Delayed(StepTimes(steps, steps), load_s=1.0, message_s=0.001)
    requests = [Length(1.0 * number, number % MODELS, 32, 40) for number in range(12)]
    shares = [
        simulated_met(
            requests, delayed, Objective(ttft_s=0.1, tpot_s=tpot_s), named(policy).make(), models=MODELS,
            memory_bytes=1_000_000_000,
        )
        for policy in ("slinfer", "default")
        for tpot_s in (0.015, 0.005)
    ]  # fmt: skip
    assert shares == [100.0, 0.0, 100.0, 0.0]


@pytest.mark.parametrize("seed", [1, 2])
def test_short_answers_are_not_refused_for_long_rounds(seed: int) -> None:
    """Decode steps of two models together exceed the time per token, but all answers end before they are late."""
    decode = tuple(StepCell(2.0**power, 64.0, 0.0045 + 0.00015 * 2**power) for power in range(6))
    prefill = tuple(StepCell(2.0**power, 2.0**power / 2, 0.0045 + 0.00005 * 2**power) for power in range(10))
    asked = requests_at(16.0, seed=seed, for_s=10.0)
    requests = [Length(each.at_s, each.model, len(each.prompt), each.output) for each in asked]
    for policy in ("slinfer", "default"):
        met = simulated_met(
            requests, Delayed(StepTimes(prefill, decode), load_s=0.4, message_s=0.002),
            Objective(ttft_s=0.13, tpot_s=0.0107), named(policy).make(), models=MODELS, memory_bytes=1_000_000_000,
        )  # fmt: skip
        assert met == 100.0, policy
