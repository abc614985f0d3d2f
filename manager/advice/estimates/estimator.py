"""Load time, run time, memory and pace of a recipe that was never measured, from similar recipes.

Measurements come from the performance store. A recipe whose normalised source is the same gets what the old one took.
Others are blended by similarity, after scaling: the effect of each number (time ~ steps^0.9) is fitted by weighted
ridge regression on logarithms, which starts from usual exponents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from stoker.contexts.performance import Estimate
from stoker.manager.advice.estimates.similar import SimilarSource, SimilarSources, SourceHistory, numbers_of
from stoker.manager.advice.source.facts import FIELDS, WorkloadFacts
from stoker.manager.core.events import ContextAdvice

# ---- effects of numbers


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


# ---- blends


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


# ---- estimates


THRESHOLD = 0.55
"""Recipes of less similarity say nothing."""
MOST_SIMILAR = 5
_WIDER = 30
_MOST_LOOKED_UP = 300


class SimilarRecipe(msgspec.Struct, frozen=True):
    """A recipe that an estimate comes from."""

    recipe: str
    function: str
    name: str
    similarity: float


class RetrievedEstimate(msgspec.Struct, frozen=True):
    """What a recipe will cost on one kind of device. Seconds and bytes; None: there is none, and `why` says why.

    `pace_s`: seconds for a unit of a call's work, by the size of its gang. `from_loads`, `from_runs`: the recipes that
    load time and memory, and run time and pace, come from, the most similar first.
    """

    kind: str
    load_s: ScatteredValue | None = None
    resident_bytes: ScatteredValue | None = None
    peak_bytes: ScatteredValue | None = None
    run_s: ScatteredValue | None = None
    pace_s: dict[int, ScatteredValue] = {}
    from_loads: tuple[SimilarRecipe, ...] = ()
    from_runs: tuple[SimilarRecipe, ...] = ()
    why: dict[str, str] = {}

    def as_advice(self) -> ContextAdvice:
        """The estimate as the manager's core takes it: means, and of memory the value that one in ten exceeds."""
        load, run = self.load_s, self.run_s
        return ContextAdvice(
            load_s=load.mean if load else 0.0,
            load_sd_s=load.sd if load else 0.0,
            resident_bytes=int(self.resident_bytes.high) if self.resident_bytes else 0,
            peak_bytes=int(self.peak_bytes.high) if self.peak_bytes else 0,
            run_s=run.mean if run else 0.0,
            run_sd_s=run.sd if run else 0.0,
            paces={size: pace.mean for size, pace in self.pace_s.items()},
        )


class Estimator:
    """Asks history. `estimates_of` says what a recipe took, by device kind: `PerformanceStore.estimates`.
    `threshold` and `most` are the paper's T and k."""

    def __init__(
        self,
        history: SourceHistory,
        estimates_of: Callable[[str], Mapping[str, Estimate]],
        *,
        threshold: float = THRESHOLD,
        most: int = MOST_SIMILAR,
    ) -> None:
        self._similar = SimilarSources(history)
        self._estimates_of = estimates_of
        self._threshold = threshold
        self._most = most

    def estimate(
        self, kind: str, *, loader: WorkloadFacts | None = None, function: WorkloadFacts | None = None
    ) -> RetrievedEstimate:
        """The estimate on devices of a kind. `loader`: the facts of the recipe's loader, for load time and memory;
        `function`: those of the function together with its loader (`joined_facts`), for run time and pace."""
        known, why = dict[str, Estimate | None](), dict[str, str]()

        def measured(source: SimilarSource) -> Estimate | None:
            recipe = source.row.recipe
            if recipe not in known:
                known[recipe] = self._estimates_of(recipe).get(kind)
            return known[recipe]

        loads = self._of(loader, measured, lambda found, _: found.loads > 0, kind, why, "load_s", of_loaders=True)
        runs = self._of(function, measured, _ran, kind, why, "run_s", of_loaders=False)
        sizes = sorted({size for _, found in runs for size in found.paces})
        return RetrievedEstimate(
            kind=kind,
            load_s=self._blend(loads, loader, lambda _, e: (e.load_s + e.start_s, e.load_sd)),
            resident_bytes=self._blend(loads, loader, lambda _, e: (_resident(e, kind), 0.0)),
            peak_bytes=self._blend(loads, loader, lambda _, e: (_peak(e, kind), 0.0)),
            run_s=self._blend(runs, function, _run_time),
            pace_s={
                size: pace
                for size in sizes
                if (pace := self._blend(runs, function, lambda _, e, size=size: _pace(e, size))) is not None  # type: ignore[misc]  # a default argument of a lambda
            },
            from_loads=_named(loads[: self._most]),
            from_runs=_named(runs[: self._most]),
            why=why,
        )

    def _of(
        self,
        facts: WorkloadFacts | None,
        measured: Callable[[SimilarSource], Estimate | None],
        has: Callable[[Estimate, SimilarSource], bool],
        kind: str,
        why: dict[str, str],
        what: str,
        *,
        of_loaders: bool,
    ) -> list[tuple[SimilarSource, Estimate]]:
        """The similar rows that were measured on this kind, the most similar first."""
        if facts is None or not (facts.text or facts.known_facts()):
            notes = f": {facts.notes[0]}" if facts is not None and facts.notes else ""
            why[what] = f"the source is not known{notes}"
            return []
        similar = self._similar.most_similar(facts, of_loaders=of_loaders, threshold=self._threshold)
        found = list[tuple[SimilarSource, Estimate]]()
        for source in similar[:_MOST_LOOKED_UP]:
            estimate = measured(source)
            if estimate is not None and has(estimate, source):
                found.append((source, estimate))
            if len(found) == _WIDER:
                break
        if not similar:
            why[what] = f"no recipe in the history has a similarity of {self._threshold:g} or more"
        elif not found:
            why[what] = f"{len(similar)} similar recipes are in the history, and none was measured on {kind}"
        return found

    def _blend(
        self,
        found: list[tuple[SimilarSource, Estimate]],
        facts: WorkloadFacts | None,
        value_of: Callable[[SimilarSource, Estimate], tuple[float, float]],
    ) -> ScatteredValue | None:
        samples = [
            MeasuredSample(value, sd, source.similarity, numbers_of(source.row.facts))
            for source, estimate in found
            for value, sd in [value_of(source, estimate)]
            if value > 0
        ]
        return blend(samples, numbers_of(facts) if facts is not None else {}, most=self._most)


def joined_facts(loader: WorkloadFacts | None, function: WorkloadFacts) -> WorkloadFacts:
    """The facts of a function on the context that a loader makes: the surer fact of each field, and both sources."""
    if loader is None:
        return function
    known = loader.known_facts()
    fields = {
        field: known[field]
        for field in known
        if field not in function.known_facts() or known[field].sure > function.known_facts()[field].sure
    }
    return msgspec.structs.replace(
        function,
        **fields,
        further={**loader.further, **function.further},
        absent={field: reason for field, reason in function.absent.items() if field not in known},
        notes=(*loader.notes, *function.notes),
        text=f"{loader.text}\n{function.text}",
        same=f"{loader.same} {function.same}" if loader.same and function.same else "",
    )


def _ran(found: Estimate, source: SimilarSource) -> bool:
    return source.row.function in found.functions or bool(found.paces)


def _run_time(source: SimilarSource, found: Estimate) -> tuple[float, float]:
    run = found.functions.get(source.row.function)
    return (run.mean, run.sd) if run is not None else (0.0, 0.0)


def _pace(found: Estimate, size: int) -> tuple[float, float]:
    pace = found.paces.get(size)
    return (pace.mean, pace.sd) if pace is not None else (0.0, 0.0)


def _resident(found: Estimate, kind: str) -> float:
    return found.resident_bytes if kind.startswith("cpu") else found.device_bytes


def _peak(found: Estimate, kind: str) -> float:
    return found.peak_bytes if kind.startswith("cpu") else found.device_bytes


def _named(found: list[tuple[SimilarSource, Estimate]]) -> tuple[SimilarRecipe, ...]:
    return tuple(
        SimilarRecipe(source.row.recipe, source.row.function, source.row.name, source.similarity) for source, _ in found
    )
