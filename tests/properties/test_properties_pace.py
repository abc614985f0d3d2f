"""The time left on progress bars is steady if results are steady, and nearly right after a few bursts."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from stoker.protocol.pace import WorkPace, format_time_left

LINE_S = 10.0


class Work(NamedTuple):
    """Devices that each return a batch about every `period_s` seconds, after a load of `load_s` seconds."""

    devices: int
    batch: int
    period_s: float
    jitter: float
    load_s: float
    load_is_known: bool
    randoms: list[float]

    @property
    def per_second(self) -> float:
        return self.devices * self.batch / self.period_s

    def arrivals(self, until_s: float) -> list[float]:
        found, number = [], 0
        for _ in range(self.devices):
            at = self.load_s
            while at <= until_s:
                number += 1
                at += self.period_s * (1 + self.jitter * (2 * self.randoms[number % len(self.randoms)] - 1))
                found.append(at)
        return sorted(found)


works = st.builds(
    Work,
    devices=st.integers(1, 8),
    batch=st.sampled_from([1, 8, 64]),
    period_s=st.floats(1.0, 200.0),
    jitter=st.floats(0.0, 0.3),
    load_s=st.sampled_from([0.0, 20.0, 100.0]),
    load_is_known=st.booleans(),
    randoms=st.lists(st.floats(0.0, 1.0), min_size=31, max_size=31),
)


def shown(work, pace, lines):
    """Return pairs (shown, true) of seconds left in the first thirtieth of a run."""
    until_s = lines * LINE_S
    total = work.per_second * until_s * 30
    arrivals, done, found = work.arrivals(until_s + LINE_S), 0, []
    for number in range(1, lines + 1):
        now = number * LINE_S
        while arrivals[done // work.batch] <= now:
            pace.add(work.batch, arrivals[done // work.batch])
            done += work.batch
        left_s = pace.left_s(total - done, now)
        if left_s is not None:
            found.append((left_s, (total - done) / work.per_second))
    return found


@given(works)
def test_time_left_never_doubles_or_halves_between_lines(work):
    pace = WorkPace(0.0)
    if work.load_is_known:
        pace.record_wait(work.load_s)
    lines = max(40, int(15 * work.period_s / LINE_S))
    left = [left_s for left_s, _ in shown(work, pace, lines)]
    assert all(before / 2 < after < 2 * before for before, after in itertools.pairwise(left))


@given(works)
def test_shown_time_left_is_soon_within_a_factor_of_two(work):
    pace = WorkPace(0.0)
    pace.record_wait(work.load_s)
    lines = max(60, int(20 * work.period_s / LINE_S))
    found = shown(work, pace, lines)[-5:]
    assert all(0.5 < left_s / true_s < 2.0 for left_s, true_s in found)


def test_rate_falls_when_no_results_arrive():
    pace = WorkPace(0.0)
    for second in range(1, 61):
        pace.add(10, float(second))
    assert abs(pace.per_second(60.0) - 10) < 0.5
    rates = [pace.per_second(float(now)) for now in (62, 70, 120, 600)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1


def test_no_rate_is_shown_before_the_first_burst_is_complete():
    pace = WorkPace(0.0)
    assert pace.left_s(10, 5.0) is None
    pace.record_wait(60.0)
    pace.add(8, 100.0)
    pace.record_wait(101.0)
    assert pace.per_second(101.0) == 0.0
    pace.add(8, 105.0)
    assert abs(pace.per_second(111.0) - 16 / 45) < 0.01
    assert pace.left_s(0, 111.0) == 0.0


def test_time_left_is_shown_in_words():
    words = [format_time_left(seconds) for seconds in (None, 0.0, 25.2, 760.0, 11_400.0)]
    assert words == ["", "left 0:00", "left 0:25", "left 12:40", "left 3 h 10 min"]


def test_slow_first_result_is_soon_forgotten():
    """After one result at 2 s, 20 results arrive each second. The shown rate was once wrong for 90 s."""
    pace = WorkPace(0.0)
    pace.add(1, 2.0)
    for second in range(3, 40):
        pace.add(20, float(second))
    assert 14 < pace.per_second(39.0) < 22
