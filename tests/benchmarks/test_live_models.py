from __future__ import annotations

import pytest

from benchmarks.serving import live_models
from benchmarks.serving.live_models import MODELS, Machine, choose_rate, objective_of, requests_at, simulate
from benchmarks.tables import Verdict
from stoker.contexts.step_times import StepCell, StepTimes

DECODE = tuple(StepCell(rows, 128, 0.01 + 0.001 * rows) for rows in (1, 4, 16, 64))
PREFILL = tuple(StepCell(tokens, length, 0.01 + 0.0001 * tokens) for tokens in (16, 128, 512) for length in (32, 256))
MACHINE = Machine(StepTimes(PREFILL, DECODE), 10_000_000_000, 2_100_000_000, 3072, 510_000_000)
OBJECTIVE = objective_of(MACHINE.times)


def met(requests, *, weighed=True):
    return simulate(requests, [each.output for each in requests], MACHINE, OBJECTIVE, weighed=weighed).met


def test_objectives_are_derived_from_the_step_times():
    assert (OBJECTIVE.ttft_s, OBJECTIVE.tpot_s) == (pytest.approx(40 * 0.014), pytest.approx(8 * 0.014))


def test_rate_changes_only_the_arrival_times_of_requests():
    slow, fast = requests_at(2.0, seed=1, for_s=20.0), requests_at(8.0, seed=1, for_s=20.0)
    assert 20 < len(slow) < 60 < len(fast)
    for one, other in zip(slow, fast, strict=False):
        assert (one.model, one.prompt, one.output, round(one.at_s, 6)) == (
            other.model, other.prompt, other.output, round(4 * other.at_s, 6),
        )  # fmt: skip
    assert len({each.model for each in fast}) == MODELS
    assert requests_at(2.0, seed=2, for_s=20.0) != slow


def test_few_requests_are_in_time_and_overload_makes_requests_late():
    assert all(met(requests_at(0.5, seed=1, for_s=10.0)))
    many = met(requests_at(200.0, seed=1, for_s=3.0))
    assert sum(many) < 0.5 * len(many)


def test_chosen_rate_separates_good_from_bad_results(monkeypatch):
    for name, value in (("HALVINGS", 2), ("LEAST_RATE", 40.0), ("MOST_RATE", 360.0)):
        monkeypatch.setattr(live_models, name, value)
    rate, predicted = choose_rate(MACHINE, OBJECTIVE, seed=1, for_s=1.5, weighed=True)
    assert live_models.WITHIN[0] <= predicted <= live_models.WITHIN[1]
    found = met(requests_at(rate, seed=1, for_s=1.5))
    assert sum(found) / len(found) == predicted


def test_run_that_differs_by_six_points_misses_the_bar():
    run = {
        "seed": 1, "requests": 100, "rate": 3.0, "ttft_s": 0.5, "tpot_s": 0.1, "predicted": 0.75, "live": 0.70,
        "simulated": 0.76, "simulated_other": 0.76, "loads": 8, "failed": {}, "step_s": [0.01, 0.01],
        "load_in_run": [1.0, 1.0], "chosen_well": True, "live_first_s": 0.2, "live_tpot_s": 0.05,
        "simulated_first_s": 0.2, "simulated_tpot_s": 0.05,
    }  # fmt: skip
    bad = live_models.table_of([run] * 3)
    assert bad.lines[0].verdict() is Verdict.MISSED
    good = live_models.table_of([{**run, "live": 0.72}] * 3)
    assert good.lines[0].verdict() is Verdict.MET
    assert "no rate was found" in live_models.table_of([{**run, "chosen_well": False}] * 3).notes[-1]
