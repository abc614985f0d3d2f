"""Choose the count (for example steps) that shows a program's progress, and compute the rate of this count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from statistics import median

import msgspec

from stoker.manager.advice.metrics.lines import BYTE, EPOCH, SAMPLE, STEP, Counter, LineMetrics

# ---- medians


_FARTHEST, _LEAST_SHARE = 5.2, 0.05
"""An outlier differs from the median by more than 5 % and by more than 5.2 median absolute deviations, which are 3.5
standard deviations (Iglewicz and Hoaglin).
"""


def drop_outliers(values: Sequence[float]) -> list[float]:
    finite = [value for value in values if isfinite(value)]
    if len(finite) < 3:
        return finite
    middle = median(finite)
    farthest = max(_FARTHEST * median(abs(value - middle) for value in finite), _LEAST_SHARE * abs(middle))
    return [value for value in finite if abs(value - middle) <= farthest]


# ---- series of counts


_JITTER_SHARE, _JITTER_POINTS = 0.1, 8
"""A count that falls by at most 10 % and recovers within 8 points does not begin a new round (such as an epoch).
Several ranks that print the count without a rank label cause such falls.
"""
_AS_GOOD_AS_DONE = 0.95
"""A count is complete when it reaches this share of its total, because a program may start the next progress bar before
it draws the end of this bar.
"""


class SeriesPoint(msgspec.Struct, frozen=True):
    """One value of a series, with its line. `at`: index of the line among the lines with metrics."""

    at: int
    line: LineMetrics
    counter: Counter


class CountSeries(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a count, in rounds (such as epochs). A round begins when the count falls. `points`: values in the
    current round. `completed_rounds`: number of earlier rounds. `first_at`: index of the first line with this count.
    """

    name: str
    unit: str
    rank: int | None
    evaluates: bool
    points: tuple[SeriesPoint, ...]
    completed_rounds: int
    first_at: int
    starts_at_zero: bool

    @property
    def newest(self) -> Counter:
        return self.points[-1].counter

    @property
    def last_at(self) -> int:
        return self.points[-1].at

    @property
    def has_loss(self) -> bool:
        return any(point.line.loss is not None for point in self.points)

    @property
    def is_unfinished(self) -> bool:
        return not _is_counter_finished(self.newest) or self.newest.total is None


def group_counts_into_series(lines: Sequence[LineMetrics]) -> list[CountSeries]:
    """Return one series per count, in the order in which the counts appear."""
    points: dict[tuple[int | None, bool, str, float | None], list[SeriesPoint]] = {}
    for at, line in enumerate(lines):
        for counter in line.counters:
            key = line.rank, line.evaluates, counter.name, counter.total
            points.setdefault(key, []).append(SeriesPoint(at, line, counter))
    found = []
    for (rank, evaluates, name, _), each in points.items():
        falls = _find_starts_of_rounds([point.counter.done for point in each])
        found.append(
            CountSeries(
                name=name, unit=each[0].counter.unit, rank=rank, evaluates=evaluates,
                points=tuple(each[falls[-1] if falls else 0 :]), first_at=each[0].at,
                completed_rounds=sum(_is_counter_finished(each[at - 1].counter) for at in falls),
                starts_at_zero=any(point.counter.done == 0 for point in each),
            )
        )  # fmt: skip
    return found


def _is_counter_finished(counter: Counter) -> bool:
    return counter.total is None or counter.done >= _AS_GOOD_AS_DONE * counter.total


def _find_starts_of_rounds(values: Sequence[float]) -> list[int]:
    found = []
    for at, (before, value) in enumerate(pairwise(values), start=1):
        near = before - value <= max(1.0, _JITTER_SHARE * before)
        reached_again = near and any(later >= before for later in values[at + 1 : at + 1 + _JITTER_POINTS])
        if value < before and not reached_again:
            found.append(at)
    return found


def choose_progress_series(found: Sequence[CountSeries]) -> tuple[CountSeries, CountSeries | None] | None:
    """Return the series that shows the progress, and the series that counts its rounds (such as epochs)."""
    counted = [each for each in found if each.unit != BYTE]
    trained = [each for each in counted if not each.evaluates] or counted
    with_total = [each for each in trained if each.newest.total is not None]
    if not with_total:
        best = max(
            trained, default=None,
            key=lambda each: (
                each.has_loss, each.unit == STEP, each.unit != EPOCH, -each.completed_rounds, each.last_at,
                each.newest.done,
            ),
        )  # fmt: skip
        return (best, None) if best else None
    fine = [each for each in with_total if each.unit != EPOCH]
    inner = _choose_innermost_series(fine) if fine else max(with_total, key=lambda each: each.last_at)
    key = inner.name, inner.newest.total, inner.evaluates
    ranks = [each for each in with_total if (each.name, each.newest.total, each.evaluates) == key]
    slowest = min(ranks, key=lambda each: each.newest.done)  # the slowest rank determines the progress
    epochs = [each for each in with_total if each.rank == inner.rank and each.unit == EPOCH != inner.unit]
    return slowest, max(epochs, key=lambda each: each.last_at, default=None)


def _choose_innermost_series(fine: Sequence[CountSeries]) -> CountSeries:
    """Return the latest series with a loss. If no series has a loss, return the unfinished series that began first,
    because it contains the others; if all are finished, the latest series.
    """
    among = [each for each in fine if each.has_loss] or fine
    running = [each for each in among if each.is_unfinished]
    if not running or among[0].has_loss:
        return max(running or among, key=lambda each: each.last_at)
    return min(running, key=lambda each: each.first_at)


# ---- rates


RATE_POINTS = 32
"""Number of newest points from which the rate is computed, because the rate changes over time."""
_LEAST_ETA_S = 3.0
"""Printed remaining times below this many seconds are not used for the rate."""
_LEAST_SPAN_S = 10.0
"""Minimum span of the line times in seconds at which they are preferred to printed times of unknown meaning."""
_FARTHEST_RATE = 3.0
"""A printed rate is ignored if it differs by more than this factor from the rate computed from the lines' times: it
counts something else, for example loaded data.
"""
_DAY_S = 86400.0


def compute_rate(series: CountSeries) -> float | None:
    """Return the rate of the current round in units per second."""
    points = series.points[-RATE_POINTS:]
    seen = [point.line.line_s for point in points if point.line.line_s is not None]
    timed = (
        _median_rate(_rates_between_points(points, "line_s"))
        if seen and max(seen) - min(seen) >= _LEAST_SPAN_S
        else None
    )
    stated = _median_rate([rate for point in points if (rate := _printed_rate(series, point))])
    if stated and (timed is None or 1 / _FARTHEST_RATE < stated / timed < _FARTHEST_RATE):
        return stated
    if timed:
        return timed
    times = [point.line.time_s for point in points if point.line.time_s]
    grows = len(times) > 2 and all(a <= b for a, b in pairwise(times)) and times[-1] > times[0]
    if times and not grows:
        return _median_rate([1 / value for value in times])
    for field in ("line_s", "elapsed_s", "time_s"):
        if found := _median_rate(_rates_between_points(points, field)):
            return found
    lefts = ((point.counter.total or 0.0, point.counter.done, point.line.eta_s or 0.0) for point in points)
    return _median_rate(
        [(total - done) / eta_s for total, done, eta_s in lefts if eta_s >= _LEAST_ETA_S and total > done]
    )


def _printed_rate(series: CountSeries, point: SeriesPoint) -> float | None:
    if series.unit == EPOCH and not series.name.startswith("bar"):
        return None
    rate = point.line.steps_per_s
    if rate is None and series.unit in (SAMPLE, "token"):
        rate = point.line.samples_per_s if series.unit == SAMPLE else point.line.tokens_per_s
    return rate if rate and rate > 0 else None


def _rates_between_points(points: Sequence[SeriesPoint], field: str) -> list[float]:
    """Return the rate between each point and the point that is half the list later. This costs less than the methods of
    Siegel and Theil.
    """
    found: list[tuple[float, float]] = []
    for point in points:
        at_s = getattr(point.line, field)
        if at_s is not None:
            if found and at_s < found[-1][0] - _DAY_S / 2 and at_s < _DAY_S:
                at_s += _DAY_S  # the time of day has passed midnight
            found.append((at_s, point.counter.done))
    pairs = zip(found, found[max(1, len(found) // 2) :], strict=False)
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs if x1 > x0 and y1 > y0]


def _median_rate(values: Sequence[float]) -> float | None:
    kept = drop_outliers(values)
    return median(kept) if kept and median(kept) > 0 else None
