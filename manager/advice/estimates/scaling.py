"""What a quantity does where a number differs: twice the steps, twice the time.

The effect of each number (an exponent, as in time ~ steps^0.9) is fitted on similar recipes by weighted ridge
regression on logarithms. A handful of recipes cannot tell five exponents, so the fit starts from what is usual: work
that is counted (steps, epochs, items, tokens) and sizes of a model come at nearly their ratio. What was measured moves
an exponent away from that as far as it has evidence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from stoker.manager.advice.source.facts import FIELDS

Array = npt.NDArray[np.float64]

FEWEST_TO_FIT = 3
_RIDGE = 1.0
_MOST_SCALING = math.log(64)
_MOST_EXTRAPOLATION = 2.0
"""Octaves beyond what was measured that an effect is trusted for."""
_COUNTED = {"steps": 0.9, "epochs": 0.9, "items": 0.9, "sequence_length": 0.9, "parameters": 0.8}
_PER_ITEM = ("items", "epochs")
_SIZES = re.compile(r"layer|depth|loop|round|repeat|token|width|hidden|dim|channel|size|d_model|cluster|feature", re.I)
_NUMBERED = re.compile(r".* \d+")


class MeasuredSample(msgspec.Struct, frozen=True):
    """What one similar recipe took: the mean and standard deviation of its measurements, its similarity and numbers."""

    value: float
    sd: float
    similarity: float
    numbers: dict[str, float] = {}

    @property
    def sound(self) -> bool:
        """True for a positive measurement."""
        return 0 < self.value < math.inf and 0 <= self.sd < math.inf


class FittedEffects(msgspec.Struct, frozen=True):
    """Effects of numbers. `exponents`: natural logarithms an octave, by the number's name; `log_sd`: how far a recipe
    is from what the others say of it, once scaled."""

    exponents: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    log_sd: float

    def scaling(self, measured: Mapping[str, float], asked: Mapping[str, float]) -> float:
        """What to add to the logarithm of a measurement for the numbers that differ."""
        total = 0.0
        for name, exponent in self.exponents.items():
            least, most = self.ranges[name]
            within = min(max(math.log2(asked[name]), least - _MOST_EXTRAPOLATION), most + _MOST_EXTRAPOLATION)
            total += exponent * (within - math.log2(measured[name]))
        return min(max(total, -_MOST_SCALING), _MOST_SCALING)


def usual_exponent(name: str, numbers: Mapping[str, float]) -> float:
    """The exponent that a number usually has. A batch size changes how work is cut, not how much there is, where the
    items are counted too."""
    if name == "batch_size":
        return 0.0 if any(other in numbers for other in _PER_ITEM) else 0.8
    if name in _COUNTED:
        return _COUNTED[name]
    sized = _SIZES.search(name) is not None and not _NUMBERED.fullmatch(name)
    return 0.8 if sized or name.startswith("loop ") else 0.0


def fit_effects(
    samples: Sequence[MeasuredSample], numbers: Mapping[str, float], *, width: float
) -> FittedEffects | None:
    """The effects of the numbers that samples and `numbers` share; None for too few samples, or none that differ.
    `width`: a sample whose similarity is so much lower than the best has a third of its weight."""
    if len(samples) < FEWEST_TO_FIT:
        return None
    names, x = _columns(samples, numbers)
    if not names:
        return None
    y = np.array([math.log(sample.value) for sample in samples])
    similarities = np.array([sample.similarity for sample in samples])
    weights = np.exp((similarities - similarities.max()) / width)
    usual = np.array([usual_exponent(name, numbers) for name in names]) * math.log(2)
    centered = x - weights @ x / weights.sum()
    rest = y - x @ usual
    rest = rest - weights @ rest / weights.sum()
    inverse = np.linalg.inv(centered.T @ (centered * weights[:, None]) + _RIDGE * np.eye(len(names)))
    moved = inverse @ (centered.T @ (rest * weights))
    # Each sample's distance from what the others say: the residual over what the sample itself does not explain.
    leverage = weights * (np.einsum("ij,jk,ik->i", centered, inverse, centered) + 1 / weights.sum())
    distances = (rest - centered @ moved) / np.maximum(1 - leverage, 0.1)
    return FittedEffects(
        exponents=dict(zip(names, map(float, usual + moved), strict=True)),
        ranges={name: (float(x[:, at].min()), float(x[:, at].max())) for at, name in enumerate(names)},
        log_sd=math.sqrt(float(weights @ distances**2 / weights.sum())),
    )


def _columns(samples: Sequence[MeasuredSample], numbers: Mapping[str, float]) -> tuple[list[str], Array]:
    """The logarithms of the numbers that all share and that differ, one column each; of two that always go together
    the first stays."""
    shared = [name for name in numbers if all(name in sample.numbers for sample in samples)]
    shared.sort(key=lambda name: (name not in FIELDS, bool(_NUMBERED.fullmatch(name)), name))
    kept, columns = list[str](), list[Array]()
    for name in shared:
        column = np.array([math.log2(sample.numbers[name]) for sample in samples])
        asked_differs = abs(math.log2(numbers[name]) - column).max() > 0.1
        if not asked_differs or any(_go_together(column, other) for other in columns):
            continue
        kept.append(name)
        columns.append(column)
    return kept, np.stack(columns, axis=1) if columns else np.zeros((len(samples), 0))


def _go_together(first: Array, second: Array) -> bool:
    a, b = first - first.mean(), second - second.mean()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return lengths > 1e-9 and abs(float(a @ b)) > 0.999 * lengths
