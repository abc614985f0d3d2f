"""Several recipes' measurements as one distribution.

The paper takes the average of the most similar jobs. Times and sizes are positive and spread over orders of magnitude,
so the average here is that of their logarithms, weighted by similarity: a log-normal distribution. Before that, each
measurement is scaled for the numbers that differ (`scaling.py`). Of the same source with the same arguments the
measurements are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from stoker.manager.advice.estimates.scaling import MeasuredSample, fit_effects

_WIDTH = 0.06
"""A recipe whose similarity is so much lower than the best has a third of its weight."""
_UNSEEN_SD = math.log(2)
"""What a recipe that was never measured may differ from its like: a factor of two. It counts as one measurement."""
_ONE_IN_TEN = 1.2816


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


def blend(samples: Sequence[MeasuredSample], numbers: Mapping[str, float], *, most: int) -> ScatteredValue | None:
    """The distribution of a quantity, from the `most` most similar samples (they come first); effects of numbers are
    fitted on all. `numbers`: those of what is asked for. None without a positive measurement."""
    samples = [sample for sample in samples if sample.sound]
    same = [sample for sample in samples if sample.similarity >= 1.0]
    nearest = (same or samples)[:most]
    if not nearest:
        return None
    effects = None if same else fit_effects(samples, numbers, width=3 * _WIDTH)
    scaled = [effects.scaling(sample.numbers, numbers) if effects is not None else 0.0 for sample in nearest]
    logs = np.array([math.log(sample.value) for sample in nearest]) + np.array(scaled)
    spreads = np.array([math.log1p((sample.sd / sample.value) ** 2) for sample in nearest])
    similarities = np.array([sample.similarity for sample in nearest])
    weights = np.exp((similarities - similarities.max()) / _WIDTH)
    weights /= weights.sum()
    middle = float(weights @ (logs - spreads / 2))
    variance, within = float(weights @ (logs - middle) ** 2), float(weights @ spreads)
    if not same:
        variance = max(variance, effects.log_sd**2 if effects is not None else 0.0)
        count = 1 / float(weights @ weights)
        unseen = _UNSEEN_SD * (1 + max(0.0, 0.9 - float(similarities.max())))
        variance = (variance * count + unseen**2) / (count + 1)
    log_sd = math.sqrt(variance + within)
    return ScatteredValue(
        median=math.exp(middle),
        low=math.exp(middle - _ONE_IN_TEN * log_sd),
        high=math.exp(middle + _ONE_IN_TEN * log_sd),
        log_sd=log_sd,
        recipes=len(nearest),
    )
