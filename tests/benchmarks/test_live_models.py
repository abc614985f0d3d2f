from __future__ import annotations

from benchmarks.serving import live_models_world
from benchmarks.serving.live_models_world import Machine, choose_rate, objective_of, requests_at, simulate
from stoker.contexts.step_times import StepCell, StepTimes

DECODE = tuple(StepCell(rows, 128, 0.01 + 0.001 * rows) for rows in (1, 4, 16, 64))
PREFILL = tuple(StepCell(tokens, length, 0.01 + 0.0001 * tokens) for tokens in (16, 128, 512) for length in (32, 256))
MACHINE = Machine(StepTimes(PREFILL, DECODE), 10_000_000_000, 2_100_000_000, 3072, 510_000_000)
OBJECTIVE = objective_of(MACHINE.times)


def met(requests, *, weighed=True):
    return simulate(requests, [each.output for each in requests], MACHINE, OBJECTIVE, weighed=weighed).met


def test_few_requests_are_in_time_and_overload_makes_requests_late():
    assert all(met(requests_at(0.5, seed=1, for_s=10.0)))
    many = met(requests_at(200.0, seed=1, for_s=3.0))
    assert sum(many) < 0.5 * len(many)


def test_chosen_rate_separates_good_from_bad_results(monkeypatch):
    for name, value in (("HALVINGS", 2), ("LEAST_RATE", 40.0), ("MOST_RATE", 360.0)):
        monkeypatch.setattr(live_models_world, name, value)
    rate, predicted = choose_rate(MACHINE, OBJECTIVE, seed=1, for_s=1.5, weighed=True)
    assert live_models_world.WITHIN[0] <= predicted <= live_models_world.WITHIN[1]
    found = met(requests_at(rate, seed=1, for_s=1.5))
    assert sum(found) / len(found) == predicted
