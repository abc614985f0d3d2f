"""The rate over the last half minute that `stoker status` shows."""

from __future__ import annotations

from collections import deque

import pytest

from stoker.protocol import pace


def bursts(period_s: int, *, until: int, count: int = 8) -> pace.Counts:
    counts: pace.Counts = deque()
    for second in range(0, until, period_s):
        pace.count_recent(counts, count, now=float(second))
    return counts


@pytest.mark.parametrize("period_s", [1, 2, 5, 8, 14])
def test_rate_is_the_same_between_two_bursts(period_s: int) -> None:
    for now in range(100, 100 + period_s):
        counts = bursts(period_s, until=now + 1)
        rate = pace.recent_per_second(counts, now=now + 0.5)
        assert rate == pytest.approx(8 / period_s, rel=0.05), "it once swung by a factor of two"


def test_rate_falls_when_a_burst_is_missing() -> None:
    counts = bursts(5, until=100)
    rates = [pace.recent_per_second(counts, now=float(now)) for now in (96, 105, 110, 120, 124)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 2
    assert pace.recent_per_second(counts, now=130.0) == 0.0


def test_first_results_count_from_their_second() -> None:
    counts: pace.Counts = deque()
    assert pace.recent_per_second(counts, now=5.0) == 0.0
    pace.count_recent(counts, 2, now=7.2)
    assert pace.recent_per_second(counts, now=7.9) == 2.0
    assert pace.recent_per_second(counts, now=11.0) == 0.5
