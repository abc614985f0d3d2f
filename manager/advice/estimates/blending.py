"""Several recipes' measurements as one distribution.

The paper takes the average of the most similar jobs. Times and sizes are positive and spread over orders of magnitude,
so the average here is that of their logarithms, weighted by similarity: a log-normal distribution. Where history has
enough similar recipes that differ in a number (a batch size, a length, a width), the effect of that number is fitted
(ridge regression on logarithms) and each measurement is scaled to what was asked for. With few recipes, or numbers
that do not differ, the fitted effects are close to none, and what is left is the weighted average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

_FLAT = 0.06
"""A recipe whose similarity is so much lower than the best has a third of its weight."""
_UNSEEN_SD = math.log(2)
"""What a recipe that was never measured may differ from its like: a factor of two. It counts as one measurement."""
_RIDGE = 1.5
_FEWEST_TO_FIT = 4
_MOST_SCALING = math.log(32)
_MOST_EXTRAPOLATION = 2.0
"""Octaves beyond what was measured that a fitted effect is trusted for."""


class ScatteredValue(msgspec.Struct, frozen=True):
    """A positive quantity that is not known exactly: log-normal, with its median, and the values below and above which
    one in ten lies. `log_sd`: the standard deviation of its natural logarithm. `recipes`: from how many it comes."""

    median: float
    low: float
    high: float
    log_sd: float
    recipes: int

    @property
    def mean(self) -> float:
        """The mean of the distribution, which is above the median."""
        return self.median * math.exp(self.log_sd**2 / 2)

    @property
    def sd(self) -> float:
        """The standard deviation, in the unit of the value."""
        return self.mean * math.sqrt(math.expm1(self.log_sd**2))


class Sample(msgspec.Struct, frozen=True):
    """What one similar recipe took: the mean and standard deviation of its measurements, its similarity and numbers."""

    value: float
    sd: float
    similarity: float
    numbers: dict[str, float] = {}


def blend(nearest: Sequence[Sample], wider: Sequence[Sample], numbers: Mapping[str, float]) -> ScatteredValue | None:
    """The distribution of a quantity, from the `nearest` samples. `wider`: those that effects of numbers are fitted on
    (the nearest among them). `numbers`: those of what is asked for. None without a positive measurement."""
    samples = [sample for sample in nearest if _sound(sample)]
    if not samples:
        return None
    same = [sample for sample in samples if sample.similarity >= 1.0]
    samples = same or samples
    logs = np.array([math.log(sample.value) for sample in samples])
    spreads = np.array([math.log1p((sample.sd / sample.value) ** 2) for sample in samples])
    similarities = np.array([sample.similarity for sample in samples])
    weights = np.exp((similarities - similarities.max()) / _FLAT)
    weights /= weights.sum()
    if not same:
        logs = logs + _scaling(samples, [sample for sample in wider if _sound(sample)], numbers)
    middle = float(weights @ (logs - spreads / 2))
    between = float(weights @ (logs - middle) ** 2)
    effective = 1 / float(weights @ weights)
    unseen = 0.0 if same else (_UNSEEN_SD * (1 + max(0.0, 0.9 - float(similarities.max())))) ** 2
    log_sd = math.sqrt((between * effective + unseen) / (effective + (not same)) + float(weights @ spreads))
    return ScatteredValue(
        median=math.exp(middle),
        low=math.exp(middle - 1.2816 * log_sd),
        high=math.exp(middle + 1.2816 * log_sd),
        log_sd=log_sd,
        recipes=len(samples),
    )


def _sound(sample: Sample) -> bool:
    return 0 < sample.value < math.inf and 0 <= sample.sd < math.inf


def _scaling(
    samples: Sequence[Sample], wider: Sequence[Sample], numbers: Mapping[str, float]
) -> npt.NDArray[np.float64]:
    """What to add to the samples' logarithms for the numbers that differ."""
    none = np.zeros(len(samples))
    if len(wider) < _FEWEST_TO_FIT:
        return none
    shared = [name for name in sorted(numbers) if all(name in sample.numbers for sample in (*samples, *wider))]
    rows = np.array([[math.log2(sample.numbers[name]) for name in shared] for sample in wider])
    varied = [place for place in range(len(shared)) if np.ptp(rows[:, place]) > 0.1]
    if not varied:
        return none
    names = [shared[place] for place in varied]
    rows = rows[:, varied]
    logs = np.array([math.log(sample.value) for sample in wider])
    similarities = np.array([sample.similarity for sample in wider])
    weights = np.exp((similarities - similarities.max()) / (3 * _FLAT))
    center, middle = weights @ rows / weights.sum(), float(weights @ logs / weights.sum())
    x, y = rows - center, logs - middle
    effects = np.linalg.solve(x.T @ (x * weights[:, None]) + _RIDGE * np.eye(len(names)), x.T @ (y * weights))
    asked = np.array([math.log2(numbers[name]) for name in names])
    asked = np.clip(asked, rows.min(axis=0) - _MOST_EXTRAPOLATION, rows.max(axis=0) + _MOST_EXTRAPOLATION)
    of_samples = np.array([[math.log2(sample.numbers[name]) for name in names] for sample in samples])
    return np.asarray(np.clip((asked - of_samples) @ effects, -_MOST_SCALING, _MOST_SCALING), np.float64)
