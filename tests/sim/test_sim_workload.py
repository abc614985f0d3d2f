from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice, pairwise
from statistics import fmean, pvariance
from typing import Any

import msgspec
import pytest

from stoker.manager.sim.client import Arrival
from stoker.manager.sim.workload import (
    BurstCalls,
    ConstantRateCalls,
    DiurnalCalls,
    Generated,
    PoissonCalls,
    SweepCalls,
    Trace,
    TraceFormat,
    Workload,
    context_names_of_workload,
    generate_arrivals,
)
from stoker.site import Duration

BURSTS = BurstCalls(
    context="llm", rate_per_s=1.0, burst_rate_per_s=20.0, calm_s=Duration(40.0), burst_s=Duration(10.0), count=40_000
)
DAY = DiurnalCalls(
    context="llm", rate_per_s=10.0, swing=0.8, period_s=Duration(600.0), peak_s=Duration(150.0), for_s=Duration(2400.0)
)
SHAPES: tuple[Generated, ...] = (
    SweepCalls(context="llm", inputs=1_000, items=10),
    ConstantRateCalls(context="llm", rate_per_s=7.0, count=100),
    PoissonCalls(context="llm", rate_per_s=7.0, count=100),
    BurstCalls(
        context="llm", rate_per_s=1.0, burst_rate_per_s=9.0, calm_s=Duration(5.0), burst_s=Duration(5.0), count=100
    ),
    DiurnalCalls(context="llm", rate_per_s=7.0, count=100),
)


def read(settings: dict[str, Any]) -> Workload:
    kind: Any = Workload
    workload: Workload = msgspec.convert(settings, kind, dec_hook=lambda unit, value: unit(value))
    return workload


def digest_of(shapes: tuple[Generated, ...]) -> str:
    return hashlib.sha256(msgspec.json.encode([list(generate_arrivals(shape, seed=3)) for shape in shapes])).hexdigest()


def test_sweep_arrives_at_once_and_its_last_call_has_the_remainder() -> None:
    calls = list(generate_arrivals(SweepCalls(context="llm", inputs=250, items=100), seed=1))
    assert calls == [Arrival(0.0, "llm", 100), Arrival(0.0, "llm", 100), Arrival(0.0, "llm", 50)]
    assert len(list(generate_arrivals(SweepCalls(context="llm", inputs=300, items=100), seed=1))) == 3


def test_constant_rate_has_equal_gaps_and_no_drift() -> None:
    calls = list(generate_arrivals(ConstantRateCalls(context="llm", rate_per_s=3.0, for_s=Duration(1000.0)), seed=1))
    assert len(calls) == 3000
    assert (calls[0].at_s, calls[2997].at_s) == (0.0, 999.0)


@pytest.mark.parametrize("workload", SHAPES, ids=lambda shape: type(shape).__name__)
def test_calls_depend_only_on_the_seed(workload: Generated) -> None:
    calls = list(generate_arrivals(workload, seed=5))
    assert len(calls) == 100
    assert calls == list(generate_arrivals(workload, seed=5))
    assert all(before.at_s <= after.at_s for before, after in pairwise(calls))
    if not isinstance(workload, SweepCalls | ConstantRateCalls):
        assert calls != list(generate_arrivals(workload, seed=6))


def test_first_calls_do_not_depend_on_the_total_number_of_calls() -> None:
    many = PoissonCalls(context={"a": 1.0, "b": 2.0}, rate_per_s=7.0, input_length=300, input_cv=1.0, count=500)
    few = msgspec.structs.replace(many, count=20)
    assert list(islice(generate_arrivals(many, seed=5), 20)) == list(generate_arrivals(few, seed=5))


def test_poisson_gaps_are_exponential() -> None:
    calls = generate_arrivals(PoissonCalls(context="llm", rate_per_s=50.0, count=40_000), seed=2)
    gaps = [after.at_s - before.at_s for before, after in pairwise(calls)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.02)
    # 1/e of the gaps of a Poisson process exceed the mean
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


def test_bursts_have_the_mean_rate_of_both_states_and_are_clustered() -> None:
    calls = list(generate_arrivals(BURSTS, seed=3))
    assert len(calls) / calls[-1].at_s == pytest.approx((40 * 1.0 + 10 * 20.0) / 50, rel=0.1)
    # The variance of a Poisson process in windows of five seconds is the mean; bursts have many times that variance.
    assert _dispersion(calls, window_s=5.0) > 10.0
    steady = list(generate_arrivals(PoissonCalls(context="llm", rate_per_s=4.8, count=40_000), seed=3))
    assert _dispersion(steady, window_s=5.0) == pytest.approx(1.0, abs=0.1)


def test_first_state_of_bursty_load_is_drawn_by_its_share_of_time() -> None:
    silent = msgspec.structs.replace(BURSTS, rate_per_s=0.0, count=1)
    at_once = sum(next(generate_arrivals(silent, seed=seed)).at_s < 0.5 for seed in range(1000))
    assert at_once / 1000 == pytest.approx(10 / 50, abs=0.05)


def test_daily_load_peaks_at_the_requested_time() -> None:
    calls = list(generate_arrivals(DAY, seed=4))
    assert len(calls) == pytest.approx(24_000, rel=0.03)
    # the peak is between the first two quarters
    by_quarter = Counter(int(call.at_s % 600.0 // 150.0) for call in calls)
    assert by_quarter[0] == pytest.approx(by_quarter[1], rel=0.05)
    # The two quarters next to the peak have 1 + swing * 2/pi times the mean arrivals. The other quarters have 1 - swing
    # * 2/pi times the mean arrivals.
    assert by_quarter[0] / by_quarter[3] == pytest.approx((1 + 0.8 * 0.6366) / (1 - 0.8 * 0.6366), rel=0.08)


def test_calls_are_divided_among_contexts_by_weight() -> None:
    mixed = PoissonCalls(context={"small": 3.0, "large": 1.0}, rate_per_s=100.0, count=10_000)
    counted = Counter(call.context for call in generate_arrivals(mixed, seed=1))
    assert counted["small"] / counted["large"] == pytest.approx(3.0, rel=0.1)
    assert context_names_of_workload(mixed) == ("small", "large")


def test_lengths_have_the_requested_mean_and_spread() -> None:
    spread = PoissonCalls(
        context="llm", rate_per_s=100.0, count=20_000, input_length=800, input_cv=0.5, expected_output=3, output_cv=2.0,
        priority=2, deadline_s=Duration(9.0),
    )  # fmt: skip
    calls = list(generate_arrivals(spread, seed=1))
    inputs = [call.input_length for call in calls]
    assert fmean(inputs) == pytest.approx(800, rel=0.02)
    assert pvariance(inputs) ** 0.5 == pytest.approx(400, rel=0.05)
    outputs = [call.output for call in calls]
    assert min(outputs) == 1  # every size is at least 1
    assert fmean(outputs) == pytest.approx(3, rel=0.1)
    # policies know the mean output length, not the output length of the call
    assert {call.expected_output for call in calls} == {3}
    assert {(call.priority, call.deadline_s) for call in calls} == {(2, 9.0)}
    assert {call.input_length for call in generate_arrivals(SHAPES[2], seed=1)} == {0}


def test_workload_settings_are_parsed_by_their_type() -> None:
    read_back = read(
        {"kind": "bursts", "context": "a", "rate": 1.0, "burst_rate": 5, "calm": 30, "burst": 9, "for": 60}
    )
    assert isinstance(read_back, BurstCalls)
    assert (read_back.burst_rate_per_s, read_back.burst_s, read_back.for_s) == (5.0, 9.0, 60.0)
    trace = read(
        {"kind": "trace", "format": "slinfer", "file": "x.json", "context": ["a", "b"], "contexts": {"f": "c"}}
    )
    assert isinstance(trace, Trace)
    assert trace.format is TraceFormat.SLINFER
    assert context_names_of_workload(trace) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "poisson", "context": "a", "rate": 5.0}, "^count: set the number of calls"),
        ({"kind": "poisson", "context": "", "rate": 5.0, "count": 1}, "^context: name the context"),
        ({"kind": "poisson", "context": {"a": 0.0}, "rate": 5.0, "count": 1}, "> 0.0"),
        ({"kind": "poisson", "context": "a", "rate": 0.0, "count": 1}, "> 0.0"),
        ({"kind": "poisson", "context": "a", "rate": 5.0, "count": 1, "burst": 3}, "unknown field `burst`"),
        ({"kind": "sweep", "context": "a"}, "missing required field `inputs`"),
        ({"kind": "diurnal", "context": "a", "rate": 5.0, "count": 1, "swing": 1.5}, "<= 1.0"),
        (
            {"kind": "diurnal", "context": "a", "rate": 5.0, "count": 1, "period": 0},
            "^period: it must be longer than 0 s",
        ),
        (
            {"kind": "bursts", "context": "a", "rate": 1.0, "burst_rate": 5.0, "calm": 0, "burst": 9, "count": 1},
            "^calm: the mean time must be at least 1 ms",
        ),
        ({"kind": "sweep", "context": "a", "inputs": 1, "gang": [4, 2]}, "^gang: at least 4 libraries and at most 2"),
        ({"kind": "sweep", "context": "a", "inputs": 1, "gang": [0, 2]}, ">= 1"),
        ({"kind": "sweep", "context": "a", "inputs": 1, "gang": 4}, "Expected `array`"),
        ({"kind": "trace", "format": "csv", "file": "f", "gang": [2, 1]}, "^gang: at least 2 libraries and at most 1"),
        (
            {"kind": "trace", "format": "philly", "file": "f", "context": "a", "item": 1, "gang": [2, 2]},
            "^gang: .*'philly' has jobs, and each GPU",
        ),
        ({"kind": "trace", "format": "azure_llm", "context": "a"}, "missing required field `file`"),
        ({"kind": "trace", "format": "azure_llm", "file": "f"}, "^context: .*'azure_llm' does not name the context"),
        ({"kind": "trace", "format": "azure_llm", "file": "f", "context": ["a", "b"]}, "^context: .*name one context"),
        ({"kind": "trace", "format": "csv", "file": "f", "contexts": {"a": "b"}}, "^contexts: .*no names"),
        ({"kind": "trace", "format": "csv", "file": "f", "cluster": "a"}, "^cluster: .*no clusters"),
        ({"kind": "trace", "format": "csv", "file": "f", "item": 2}, "^item: .*no durations"),
        (
            {"kind": "trace", "format": "philly", "file": "f", "context": "a"},
            "^item: .*set the part of a job that is one item",
        ),
        (
            {"kind": "trace", "format": "elasticflow", "file": "f", "context": "a", "item": 1, "deadline": 5},
            "^deadline: .*already has a deadline for each job",
        ),
        (
            {"kind": "trace", "format": "philly", "file": "f", "context": "a", "item": 1, "items": 5},
            "^items: .*has durations",
        ),
    ],
)
def test_impossible_workload_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=problem):
        read(settings)


def _dispersion(calls: list[Arrival], *, window_s: float) -> float:
    counted = Counter(int(call.at_s / window_s) for call in calls)
    numbers = [counted[window] for window in range(int(calls[-1].at_s / window_s))]
    return pvariance(numbers) / fmean(numbers)
