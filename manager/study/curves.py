"""What is drawn of a run: few enough points for a picture, however many calls there were, and small enough to keep for
hundreds of runs."""

from __future__ import annotations

from array import array

import msgspec

from stoker.manager.study.measures import Measures, Steps
from stoker.manager.study.statistics import quantile

POINTS = 1_000
"""So many steps of a curve are kept. A picture has about as many columns."""
SHARES = tuple(number / 200 for number in range(201))
"""Of which shares of all calls the times are kept."""


class Curves(msgspec.Struct, frozen=True):
    """One run. The curves are those of `Measures`; `waits_s` and `turnarounds_s` are the quantiles at `SHARES`, in
    seconds, and empty where no call began or ended."""

    ended_at: float
    completed: Steps
    devices: Steps
    queue: Steps
    waits_s: tuple[float, ...]
    turnarounds_s: tuple[float, ...]


def curves_of(measures: Measures) -> Curves:
    """What is drawn of a run that was measured."""
    return Curves(
        measures.ended_at,
        thinned(measures.completed),
        thinned(measures.devices),
        thinned(measures.queue),
        _quantiles(measures.waits_s),
        _quantiles(measures.turnarounds_s),
    )


def thinned(steps: Steps, *, points: int = POINTS) -> Steps:
    """The same curve with at most `points` steps: as it is, or sampled at equal distances. First and last stay."""
    if len(steps.at_s) <= points:
        return steps
    first, last = steps.at_s[0], steps.at_s[-1]
    each_s = (last - first) / (points - 1)
    moments = [first + number * each_s for number in range(points - 1)]
    return Steps((at_s, steps.value(at_s)) for at_s in [*moments, last])


def _quantiles(values: array[float]) -> tuple[float, ...]:
    return tuple(quantile(values, share) for share in SHARES) if values else ()
