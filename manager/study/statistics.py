"""Means with 95 % intervals over few seeds, and quantiles.

A mean of n independent runs has Student's t interval with n - 1 degrees of freedom. For integer degrees, the
distribution function of t is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), inverted here by bisection.
Policies are compared seed by seed (common random numbers; Law, "Simulation Modeling and Analysis").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, stdev

import msgspec


class MeanEstimate(msgspec.Struct, frozen=True):
    """A mean over `runs` runs, and the half width of its 95 % interval (None for one run)."""

    mean: float
    half_width: float | None
    runs: int

    @property
    def low(self) -> float:
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half_width or 0.0)


def estimate_mean(values: Sequence[float]) -> MeanEstimate:
    """Return the mean of independent runs. Raises ValueError without values or for infinite values."""
    if not values:
        raise ValueError("the mean of no runs is not defined")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"the mean of {list(values)} is not defined: some values are not finite numbers")
    if len(values) == 1:
        return MeanEstimate(float(values[0]), None, 1)
    half_width = t_quantile(0.975, degrees=len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return MeanEstimate(fmean(values), half_width, len(values))


def estimate_difference(values: Sequence[float], others: Sequence[float]) -> MeanEstimate:
    """Return the mean difference `values` - `others`, paired by seed."""
    if len(values) != len(others):
        raise ValueError(f"{len(values)} runs and {len(others)} runs cannot be compared seed by seed")
    return estimate_mean([value - other for value, other in zip(values, others, strict=True)])


def quantile(values: Sequence[float], share: float) -> float:
    """Return the interpolated quantile of sorted values (Hyndman and Fan's type 7). Raises ValueError."""
    if not values or not 0.0 <= share <= 1.0:
        raise ValueError(f"quantile {share} of {len(values)} values is not defined")
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


@lru_cache(maxsize=256)
def t_quantile(share: float, *, degrees: int) -> float:
    """Return a quantile of Student's t-distribution. `share`: at least 0.5, below 1."""
    if not (0.5 <= share < 1.0 and degrees >= 1):
        raise ValueError(f"quantile {share} of t with {degrees} degrees of freedom is not defined")
    low, high = 0.0, math.pi / 2
    for _ in range(64):
        angle = (low + high) / 2
        if _central_probability(angle, degrees) < 2.0 * share - 1.0:
            low = angle
        else:
            high = angle
    return math.tan(low) * math.sqrt(degrees)


def _central_probability(angle: float, degrees: int) -> float:
    cosine, odd = math.cos(angle), degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    share = math.sin(angle) * total
    return (angle + share) * 2.0 / math.pi if odd else share
