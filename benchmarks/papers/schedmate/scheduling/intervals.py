"""Compute means and ratios over windows, with intervals from a paired bootstrap.

The unit is a week of a virtual cluster. Weeks are drawn with replacement within each virtual cluster, the same weeks
for each system. An interval contains the middle 95 % of 2,000 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.schedmate.scheduling import settings
from stoker.chance import Stream

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
"""Indices of windows: one row in total or per resample."""
Of = Callable[[Places], Numbers]


class Interval(msgspec.Struct, frozen=True):
    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        shown = 0 if abs(self.value) >= 1000 else digits
        value, low, high = (f"{each:,.{shown}f}" for each in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"

    @property
    def is_above_one(self) -> bool:
        return self.low > 1.0


@lru_cache(maxsize=64)
def resamples(strata: tuple[str, ...], chosen: tuple[int, ...]) -> Places:
    groups: dict[str, list[int]] = {}
    for place in chosen:
        groups.setdefault(strata[place], []).append(place)
    chance, number, found = Stream(settings.SEED, "bootstrap"), 0, []
    for _ in range(settings.RESAMPLES):
        drawn: list[int] = []
        for members in groups.values():
            drawn += [members[int(chance.uniform(number + which) * len(members))] for which in range(len(members))]
            number += len(members)
        found.append(drawn)
    return np.array(found)


def interval(of: Of, strata: tuple[str, ...], chosen: tuple[int, ...] | None = None) -> Interval:
    places = tuple(range(len(strata))) if chosen is None else chosen
    tail = (1 - settings.CONFIDENCE) / 2
    low, high = np.quantile(of(resamples(strata, places)), [tail, 1 - tail])
    return Interval(float(of(np.array([places]))[0]), float(low), float(high))


def pooled_mean(values: Sequence[float], jobs: Sequence[float]) -> Of:
    sums, counts = np.array(values) * np.array(jobs), np.array(jobs)
    return lambda places: sums[places].sum(axis=1) / counts[places].sum(axis=1)


def pooled_ratio(ours: Sequence[float], theirs: Sequence[float], jobs: Sequence[float]) -> Of:
    one, other = pooled_mean(ours, jobs), pooled_mean(theirs, jobs)
    return lambda places: one(places) / other(places)


def geometric_mean(values: Sequence[float]) -> Of:
    logs = np.log(values)
    return lambda places: np.exp(logs[places].mean(axis=1))


def mean_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Of:
    return geometric_mean([one / other for one, other in zip(ours, theirs, strict=True)])
