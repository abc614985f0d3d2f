from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.fleet import best_allocation, runtime_demands
from benchmarks.papers.arlo.workload import LatencyProfile, Workload, lengths_of, make_trace

BASE, LARGE = LatencyProfile("base"), LatencyProfile("large", 10.5)
SHORT, LONG = [80], [400]


def test_latencies_equal_those_of_the_paper() -> None:
    assert 1000 * BASE.static_s(512) == pytest.approx(4.86)
    assert 1000 * BASE.static_s(64) == pytest.approx(4.86 / 4.22)
    assert 1000 * BASE.static_s(20) == pytest.approx(4.86 / 4.28)
    assert 1000 * LARGE.static_s(64) == pytest.approx(10.5 / 5.25)
    assert (BASE.capacity(512), BASE.capacity(64), LARGE.capacity(512)) == (30, 130, 42)


def test_arrivals_follow_their_rate_and_vary_more_if_bursty() -> None:
    spread = {}
    for pattern in ("stable", "bursty", "mildly bursty"):
        trace = make_trace(Workload(500.0, 60.0, 4, pattern), SHORT, LONG)
        assert all(a <= b for a, b in pairwise(trace.times))
        assert len(trace.times) == pytest.approx(30_000, rel=0.05)
        counts = [0] * 600
        for arrived in trace.times:
            counts[int(arrived * 10)] += 1
        spread[pattern] = statistics.pvariance(counts) / statistics.mean(counts)
    assert spread["stable"] == pytest.approx(1.0, abs=0.2)
    assert spread["bursty"] > 4
    assert 1.5 < spread["mildly bursty"] < spread["bursty"] / 1.5


def test_share_of_long_requests_varies_slowly_unless_disabled() -> None:
    def shares(drift: float) -> list[float]:
        lengths = make_trace(Workload(50.0, settings.DRIFT_PERIOD_S, 2, drift=drift), SHORT, LONG).lengths
        parts = [lengths[part * len(lengths) // 8 : (part + 1) * len(lengths) // 8] for part in range(8)]
        return [part.count(400) / len(part) for part in parts]

    assert statistics.mean(shares(1.0)) == pytest.approx(1 / 3, abs=0.03)
    assert max(shares(1.0)) - min(shares(1.0)) == pytest.approx(1 / 3, abs=0.08)
    assert max(shares(0.0)) - min(shares(0.0)) < 0.08


def test_long_requests_get_more_instances_under_overload() -> None:
    """Without `overload_s`, equation 5 gives the longest runtime one instance, although its demand is 1.6 times the
    capacity.
    """
    lengths = [64] * 80 + [512] * 20
    plain = runtime_demands(lengths, 1600.0, lengths_of(8), BASE)
    assert plain[-1].requests / plain[-1].capacity == pytest.approx(1.6)
    assert best_allocation(4, plain)[-1] == 1
    assert best_allocation(4, runtime_demands(lengths, 1600.0, lengths_of(8), BASE, overload_s=60.0))[-1] == 2

    wanted = runtime_demands([64] * 5 + [512] * 5, 10_000.0, lengths_of(8), BASE)
    found = best_allocation(10, wanted)
    assert sum(found) == 10
    assert found[-1] > found[0] > 0
