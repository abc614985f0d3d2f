"""How fast a series rises: from the rates that its lines state, from its times, or from the looks at it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import median

import msgspec

from stoker.manager.advice.metrics.counts import EPOCH, SAMPLE
from stoker.manager.advice.metrics.robust import deviation, slopes, without_outliers
from stoker.manager.advice.metrics.series import CountSeries, SeriesPoint

NEWEST = 32
"""Points that a rate is made of: the newest ones, as a program gets slower when another one comes beside it."""
_LEAST_ERROR = 0.02
_LEAST_ETA_S = 3.0
"""Programs round the time left to seconds."""
_LEAST_SPAN_S = 10.0
"""Lines name their seconds. Over this span that is exact enough, and surer than a time of which the line does not say
what took it."""
_FARTHEST = 3.0
"""A stated rate that is so many times that by the times of lines is the rate of something else (of loading data)."""
_DAY_S = 86400.0


class Pace(msgspec.Struct, frozen=True):
    """Units of a series a second. `spread`: the standard deviation of single values. `values`: how many there are.
    `source`: what it was taken from."""

    per_s: float
    spread: float
    values: int
    source: str

    @property
    def error_share(self) -> float:
        """The standard error of the rate as a share of it."""
        return max(_LEAST_ERROR, 1.25 * self.spread / self.per_s / sqrt(self.values))


def pace(series: CountSeries, evaluated_at: Sequence[int]) -> Pace | None:
    """The rate of a series; while its round is too young to tell, that of the round before. `evaluated_at`: places of
    lines of an evaluation, whose time is not the series'."""
    return _pace_of(series, series.points[-NEWEST:], evaluated_at) or _pace_of(
        series, series.earlier[-NEWEST:], evaluated_at
    )


def _pace_of(series: CountSeries, points: Sequence[SeriesPoint], evaluated_at: Sequence[int]) -> Pace | None:
    seen = [point.line.line_s for point in points if point.line.line_s is not None]
    timed = None
    if seen and max(seen) - min(seen) >= _LEAST_SPAN_S:
        timed = _pace(_rises(points, "line_s", evaluated_at), "the times of lines")
    stated = [rate for point in points if (rate := _stated(series, point)) is not None]
    found = _pace(stated, "the rates that lines state")
    if found and (timed is None or 1 / _FARTHEST < found.per_s / timed.per_s < _FARTHEST):
        return found
    if timed:
        return timed
    times = [point.line.time_s for point in points if point.line.time_s]
    grows = len(times) > 2 and all(a <= b for a, b in pairwise(times)) and times[-1] > times[0]
    if times and not grows and (found := _pace([1 / value for value in times], "the times that lines state")):
        return found
    for field, source in (
        ("line_s", "the times of lines"),
        ("elapsed_s", "elapsed times"),
        ("time_s", "elapsed times"),
    ):
        found = _pace(_rises(points, field, evaluated_at), source)
        if found:
            return found
    return _pace([rate for point in points if (rate := _expected(point))], "the times left that lines state")


def _expected(point: SeriesPoint) -> float | None:
    """The rate at which the count is at its total when the line says so."""
    left, eta_s = (point.counter.total or 0.0) - point.counter.done, point.line.eta_s
    return left / eta_s if eta_s and eta_s >= _LEAST_ETA_S and left > 0 else None


def _stated(series: CountSeries, point: SeriesPoint) -> float | None:
    line = point.line
    rate = line.steps_per_s
    if series.unit == EPOCH and not series.name.startswith("bar"):
        return None
    if rate is None and series.unit == SAMPLE:
        rate = line.samples_per_s
    if rate is None and series.unit == "token":
        rate = line.tokens_per_s
    return rate if rate and rate > 0 else None


def _rises(points: Sequence[SeriesPoint], field: str, evaluated_at: Sequence[int]) -> list[float]:
    """Rises a second between points that no evaluation lies between."""
    found: list[float] = []
    part: list[tuple[float, float]] = []
    before = -1
    for point in points:
        at_s = getattr(point.line, field)
        if at_s is None:
            continue
        if part and (at_s < part[-1][0] - _DAY_S / 2 and at_s < _DAY_S):
            at_s += _DAY_S  # The time of a day, past midnight.
        if any(before < at < point.at for at in evaluated_at):
            found += slopes(part)
            part = []
        part.append((at_s, point.counter.done))
        before = point.at
    return [slope for slope in found + slopes(part) if slope > 0]


def _pace(values: Sequence[float], source: str) -> Pace | None:
    kept = without_outliers(values)
    if not kept or median(kept) <= 0:
        return None
    return Pace(median(kept), deviation(kept), len(kept), source)
