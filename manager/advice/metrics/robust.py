"""Statistics that a few wrong values do not move: medians and their spread. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import median

_NORMAL = 1.4826
"""The standard deviation of normal values over their median absolute deviation."""
_FARTHEST = 3.5
"""Deviations from the median beyond which a value is an outlier (Iglewicz and Hoaglin)."""
_LEAST_SHARE = 0.05
"""Values this near to the median are no outliers, however near the others are."""


def without_outliers(values: Sequence[float]) -> list[float]:
    """The finite values that lie near their median, in their order."""
    finite = [value for value in values if isfinite(value)]
    if len(finite) < 3:
        return finite
    middle, spread = median(finite), deviation(finite)
    farthest = max(_FARTHEST * spread, _LEAST_SHARE * abs(middle))
    return [value for value in finite if abs(value - middle) <= farthest]


def deviation(values: Sequence[float]) -> float:
    """The spread of values, as a standard deviation: 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    return _NORMAL * median(abs(value - middle) for value in values)


def slopes(points: Sequence[tuple[float, float]]) -> list[float]:
    """Rises per unit between points (x, y) half of the points apart (Siegel and Theil's idea, at linear cost), so that
    neither an outlier nor the resolution of x counts much."""
    lag = max(1, len(points) // 2)
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in zip(points, points[lag:], strict=False) if x1 > x0]
