"""Counts over the lines of a log, and which of them is the progress. Pure.

A *series* is one count over time: the same name, the same total, the same rank. Its value rises; where it falls, the
program began anew (a restart) or began its next round (the bar of an epoch). The progress is the outermost series that
has a total and is not at its end: an evaluation's bar, the bar of a download and the bar of one epoch come and go
within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from stoker.manager.advice.metrics.counts import BYTE, EPOCH, STEP
from stoker.manager.advice.metrics.line_metrics import Counter, LineMetrics

_JITTER_SHARE, _JITTER_POINTS = 0.1, 8
"""Ranks that print without a label are a little apart: a value that falls by no more than this share, and is reached
again within so many points, is no restart."""
_AS_GOOD_AS_DONE = 0.95
"""A bar that another one follows may not have been drawn at its end."""


class SeriesPoint(msgspec.Struct, frozen=True):
    """A line of a series. `at`: the line's place among the lines with metrics, oldest first."""

    at: int
    line: LineMetrics
    counter: Counter


class CountSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A count over time.

    `points`: those since the last fall, oldest first; `earlier`: those between the last two falls. `falls`: how often
    the value fell from its end, to begin its next round. `first_at`: the place of its first line, before any fall.
    """

    name: str
    unit: str
    rank: int | None
    evaluates: bool
    points: tuple[SeriesPoint, ...]
    falls: int
    first_at: int
    starts_at_zero: bool
    earlier: tuple[SeriesPoint, ...] = ()

    @property
    def newest(self) -> Counter:
        """The last count."""
        return self.points[-1].counter

    @property
    def last_at(self) -> int:
        """The place of the last line."""
        return self.points[-1].at

    @property
    def with_loss(self) -> bool:
        """True if a line of it has a loss."""
        return any(point.line.loss is not None for point in self.points)

    @property
    def is_over(self) -> bool:
        """True if the count is at its total, or nearly."""
        return self.newest.total is not None and _is_at_its_end(self.newest)


class ProgressSeries(msgspec.Struct, frozen=True):
    """The series that are the progress. `outer`: counts rounds of `inner`, if something does. `inner`: the finest."""

    inner: CountSeries
    outer: CountSeries | None = None


def series_of(lines: Sequence[LineMetrics]) -> list[CountSeries]:
    """The series of all counts of these lines (oldest first)."""
    points: dict[tuple[int | None, bool, str, float | None], list[SeriesPoint]] = {}
    for at, line in enumerate(lines):
        for counter in line.counters:
            key = line.rank, line.evaluates, counter.name, counter.total
            points.setdefault(key, []).append(SeriesPoint(at, line, counter))
    found = []
    for (rank, evaluates, name, _), each in points.items():
        falls = _falls([point.counter.done for point in each])
        since = falls[-1] if falls else 0
        before = falls[-2] if len(falls) > 1 else 0
        found.append(
            CountSeries(
                name=name, unit=each[0].counter.unit, rank=rank, evaluates=evaluates, points=tuple(each[since:]),
                falls=sum(_is_at_its_end(each[at - 1].counter) for at in falls), first_at=each[0].at,
                starts_at_zero=any(point.counter.done == 0 for point in each), earlier=tuple(each[before:since]),
            )
        )  # fmt: skip
    return found


def _is_at_its_end(counter: Counter) -> bool:
    """True if the count is at its total, or nearly, or has none."""
    return counter.total is None or counter.done >= _AS_GOOD_AS_DONE * counter.total


def _falls(values: Sequence[float]) -> list[int]:
    """The places at which values begin anew."""
    found = []
    for at in range(1, len(values)):
        before, value = values[at - 1], values[at]
        if value >= before:
            continue
        near = before - value <= max(1.0, _JITTER_SHARE * before)
        if not (near and any(later >= before for later in values[at + 1 : at + 1 + _JITTER_POINTS])):
            found.append(at)
    return found


def choose_progress(found: Sequence[CountSeries]) -> ProgressSeries | None:
    """The series that are the progress of the program; None if nothing counts."""
    counted = [each for each in found if each.unit != BYTE]
    trained = [each for each in counted if not each.evaluates] or counted
    with_total = [each for each in trained if each.newest.total is not None]
    if not with_total:
        return _without_total(trained)
    fine = [each for each in with_total if each.unit != EPOCH]
    inner = _innermost(fine) if fine else max(with_total, key=lambda each: each.last_at)
    outer = _outer(inner, with_total)
    return ProgressSeries(_slowest_rank(inner, with_total), outer)


def _innermost(fine: Sequence[CountSeries]) -> CountSeries:
    """Of the counts of steps: one with a loss if there is one. Of several, the one that began first and goes on, as
    the others are within it; if all are over, the last."""
    among = [each for each in fine if each.with_loss] or fine
    running = [each for each in among if not each.is_over]
    if not running:
        return max(among, key=lambda each: each.last_at)
    if among[0].with_loss:
        return max(running, key=lambda each: each.last_at)
    # A bar within this one may have rounds of its own: it is the finer count of the two.
    outermost = min(running, key=lambda each: each.first_at)
    rounds = [each for each in among if each.falls and each.first_at > outermost.first_at and not outermost.falls]
    nested = [each for each in rounds if _counts_rounds(outermost, each)]
    return max(nested, key=lambda each: each.last_at) if nested else outermost


def _outer(inner: CountSeries, with_total: Iterable[CountSeries]) -> CountSeries | None:
    others = [each for each in with_total if each.name != inner.name and each.rank == inner.rank]
    epochs = [each for each in others if each.unit == EPOCH and inner.unit != EPOCH]
    if epochs:
        return max(epochs, key=lambda each: each.last_at)
    around = [each for each in others if inner.falls and not each.falls and _counts_rounds(each, inner)]
    return min(around, key=lambda each: each.first_at, default=None)


def _counts_rounds(outer: CountSeries, inner: CountSeries) -> bool:
    """True if the outer count rises by about one for each round of the inner one."""
    if not outer.name.startswith("bar") or outer.first_at > inner.points[0].at:
        return False
    risen = outer.newest.done - outer.points[0].counter.done
    return abs(risen - inner.falls) <= 1 and risen > 0


def _slowest_rank(inner: CountSeries, found: Iterable[CountSeries]) -> CountSeries:
    """The series of the rank that is the least far: the program is as far as that."""
    ranks = [
        each
        for each in found
        if (each.name, each.newest.total, each.evaluates) == (inner.name, inner.newest.total, inner.evaluates)
    ]
    return min(ranks, key=lambda each: each.newest.done)


def _without_total(trained: Sequence[CountSeries]) -> ProgressSeries | None:
    """Of counts without a total: a step before an epoch, one that never fell, the largest."""
    best = max(
        trained,
        key=lambda each: (
            each.with_loss,
            each.unit == STEP,
            each.unit != EPOCH,
            -each.falls,
            each.last_at,
            each.newest.done,
        ),
        default=None,
    )
    return ProgressSeries(best) if best else None
