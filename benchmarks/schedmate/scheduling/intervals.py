"""Means and ratios over windows, with intervals from a paired bootstrap.

The unit is a week of a virtual cluster: its jobs meet in one queue and are not independent. Weeks are drawn again with
replacement within each virtual cluster, the same ones for each system (common windows, so a ratio is of pairs), and the
number is computed anew; the interval holds the middle 95 % of 2,000 such numbers. Where an error is drawn several
times, a week has the mean of its draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from benchmarks.schedmate.scheduling import settings
from stoker.chance import Stream
from stoker.manager.study.statistics import quantile

Values = Sequence[float]
"""One number a window."""


class Interval(msgspec.Struct, frozen=True):
    """A number, and the interval around it."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """As the page has it; numbers from a thousand on have no decimals."""
        value, low, high = (
            f"{each:,.{0 if abs(self.value) >= 1000 else digits}f}" for each in (self.value, self.low, self.high)
        )
        return f"{value} ({low} to {high})"

    @property
    def is_above_one(self) -> bool:
        """All of it."""
        return self.low > 1.0


@lru_cache(maxsize=64)
def resamples(strata: tuple[str, ...], chosen: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Places of windows, drawn again: of those that are `chosen`, as many of each stratum as it has."""
    groups: dict[str, list[int]] = {}
    for place in chosen:
        groups.setdefault(strata[place], []).append(place)
    chance, number, found = Stream(settings.SEED, "bootstrap"), 0, []
    for _ in range(settings.RESAMPLES):
        drawn: list[int] = []
        for members in groups.values():
            drawn += [members[int(chance.uniform(number + which) * len(members))] for which in range(len(members))]
            number += len(members)
        found.append(tuple(drawn))
    return tuple(found)


def interval(
    of: Callable[[Sequence[int]], float], strata: tuple[str, ...], chosen: tuple[int, ...] | None = None
) -> Interval:
    """A number of windows, by their places, and its interval. `chosen`: the windows that count (None: all)."""
    places = tuple(range(len(strata))) if chosen is None else chosen
    rising = sorted(of(drawn) for drawn in resamples(strata, places))
    tail = (1 - settings.CONFIDENCE) / 2
    return Interval(of(places), quantile(rising, tail), quantile(rising, 1 - tail))


def pooled_mean(values: Values, jobs: Values, places: Sequence[int]) -> float:
    """The mean over all jobs of these windows; `values` are the windows' own means."""
    return sum(values[place] * jobs[place] for place in places) / sum(jobs[place] for place in places)


def pooled_ratio(ours: Values, theirs: Values, jobs: Values, places: Sequence[int]) -> float:
    """Of two such means."""
    return pooled_mean(ours, jobs, places) / pooled_mean(theirs, jobs, places)


def mean_ratio(ours: Values, theirs: Values, places: Sequence[int]) -> float:
    """The geometric mean of the windows' ratios: each counts the same."""
    return math.exp(sum(math.log(ours[place] / theirs[place]) for place in places) / len(places))


def geometric_mean(values: Values, places: Sequence[int]) -> float:
    """Over windows; each counts the same."""
    return math.exp(sum(math.log(values[place]) for place in places) / len(places))
