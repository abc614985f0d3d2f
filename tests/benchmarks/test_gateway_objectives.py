from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client")


from benchmarks.serving.gateway_objectives import (
    FORCING,
    LIMITED_DEVICES,
    MODELS,
    Outcome,
    Request,
    figures,
    requests_at,
    share_met,
    simulated,
    simulated_replays,
)
from benchmarks.serving.simulated_models import Delayed
from stoker.contexts.step_times import StepCell, StepTimes
from stoker.manager.live import session_policies
from stoker.manager.policies import find_shipped_policy
from stoker.protocol.calls import Objective

WANTED = Objective(ttft_s=1.0, tpot_s=0.1)


def outcome(tokens: int, *, ttft_s: float, tpot_s: float) -> Outcome:
    return Outcome(200, ttft_s, tpot_s, tokens, [ttft_s + n * tpot_s for n in range(tokens)])


def test_refused_late_and_truncated_requests_miss_their_objectives() -> None:
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
    requests = [Request(1.0 * number, number % MODELS, "x" * 32, 40) for number in range(12)]
    shares = [
        share_met(
            simulated(requests, find_shipped_policy(policy).make(), delayed, Objective(ttft_s=0.1, tpot_s=tpot_s))
        )
        for policy in ("slinfer", "default")
        for tpot_s in (0.015, 0.005)
    ]
    assert shares == [100.0, 0.0, 100.0, 0.0]


@pytest.mark.parametrize("seed", [1, 2])
def test_short_requests_in_time_are_accepted_despite_slow_steps(seed: int) -> None:
    """Decode steps of two models together exceed the time per token, but all answers end before they are late."""
    decode = tuple(StepCell(2.0**power, 64.0, 0.0045 + 0.00015 * 2**power) for power in range(6))
    prefill = tuple(StepCell(2.0**power, 2.0**power / 2, 0.0045 + 0.00005 * 2**power) for power in range(10))
    requests = requests_at(16.0, seed=seed, for_s=10.0)
    for policy in ("slinfer", "default"):
        delayed = Delayed(StepTimes(prefill, decode), load_s=0.4, message_s=0.002)
        late = simulated(requests, find_shipped_policy(policy).make(), delayed, Objective(ttft_s=0.13, tpot_s=0.0107))
        assert share_met(late) == 100.0, policy


def test_policy_of_the_replays_can_be_created() -> None:
    assert session_policies.find_policy(FORCING).make().dispatch


def test_exact_forecasts_refuse_mostly_requests_that_cause_lateness() -> None:
    prefill = tuple(StepCell(2.0**power, 2.0**power / 2, 0.006 + 0.0006 * 2**power) for power in range(10))
    decode = tuple(StepCell(2.0**power, 64.0, 0.008 + 0.0012 * 2**power) for power in range(6))
    delayed = Delayed(StepTimes(prefill, decode), load_s=0.4, message_s=0.0)
    requests = requests_at(11.0, seed=1, for_s=20.0)
    found = simulated_replays(requests, delayed, Objective(ttft_s=0.8, tpot_s=0.045), margin=1.0)
    assert found["of"] >= 5
    assert found["late"] + found["harm"] >= 0.9 * found["of"]


def test_limited_steps_compute_for_the_share_of_their_time() -> None:
    program = """
import time
import sitecustomize
class Engine:
    def _compute_step(self, step):
        return sum(range(step))
sitecustomize.limit(Engine, 0.25)
began, cpu_s = time.perf_counter(), time.thread_time()
results = [Engine()._compute_step(300_000) for _ in range(5)]
print(results[0], (time.thread_time() - cpu_s) / (time.perf_counter() - began))
"""
    environment = {**os.environ, "PYTHONPATH": str(LIMITED_DEVICES)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    result, share = run.stdout.split()
    assert int(result) == 44_999_850_000
    assert 0 < float(share) < 0.3
