"""Estimate the costs of a recipe (load time, run time, memory, pace) from similar recipes (SchedMate §3.1). If the
history has recipes with the same normalised source, only these count. Otherwise, average the scaled measurements of
similar recipes, weighted by similarity. A weighted ridge regression on logarithms fits the effect of each number in the
code (time ~ steps^0.9); usual exponents are the prior.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from stoker.contexts.performance import Estimate, Measured, PerformanceStore, RecipeRecord
from stoker.errors import ConfigError
from stoker.manager.advice.similar import SimilarSource, SimilarSourceFinder, SourceHistory, extract_numbers
from stoker.manager.advice.source.extractor import SourceText, extract_facts, find_loader
from stoker.manager.advice.source.facts import FIELDS, WorkloadFacts
from stoker.manager.core.events import ContextAdvice

# ---- effects of numbers


Array = npt.NDArray[np.float64]

FEWEST_TO_FIT = 3
_RIDGE = 1.0
_MOST_SCALING = math.log(64)
_COUNTED = {"steps": 0.9, "epochs": 0.9, "items": 0.9, "sequence_length": 0.9, "parameters": 0.8}
_PER_ITEM = ("items", "epochs")
_SIZES = re.compile(r"layer|depth|loop|round|repeat|token|width|hidden|dim|channel|size|d_model|cluster|feature", re.I)
_NUMBERED = re.compile(r".* \d+")


class MeasuredSample(msgspec.Struct, frozen=True):
    value: float
    sd: float
    similarity: float
    numbers: dict[str, float] = {}


class FittedEffects(msgspec.Struct, frozen=True):
    """Effects of numbers in the code (such as steps) on a cost. `exponents`: change of the cost's logarithm if a number
    doubles. `log_sd`: error of the logarithm if each recipe is estimated from the others.
    """

    exponents: dict[str, float]
    log_sd: float

    def log_scale_factor(self, measured: Mapping[str, float], wanted_numbers: Mapping[str, float]) -> float:
        total = sum(each * math.log2(wanted_numbers[name] / measured[name]) for name, each in self.exponents.items())
        return min(max(total, -_MOST_SCALING), _MOST_SCALING)


def usual_exponent(name: str, numbers: Mapping[str, float]) -> float:
    """Return the usual exponent of a number: 0 for `batch_size` if `numbers` contains items or epochs."""
    if name == "batch_size":
        return 0.0 if any(other in numbers for other in _PER_ITEM) else 0.8
    if name in _COUNTED:
        return _COUNTED[name]
    sized = _SIZES.search(name) is not None and not _NUMBERED.fullmatch(name)
    return 0.8 if sized or name.startswith("loop ") else 0.0


def fit_effects(
    samples: Sequence[MeasuredSample], numbers: Mapping[str, float], *, width: float
) -> FittedEffects | None:
    """Return the effects of the numbers that all samples and `numbers` contain, or None without enough samples.
    `width`: the drop in similarity that divides a weight by e."""
    if len(samples) < FEWEST_TO_FIT:
        return None
    names, x = _columns_of_differing_numbers(samples, numbers)
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
    # Deviation of each sample from its estimate by the other samples: the residual, divided by 1 - leverage.
    leverage = weights * (np.einsum("ij,jk,ik->i", centered, inverse, centered) + 1 / weights.sum())
    distances = (rest - centered @ moved) / np.maximum(1 - leverage, 0.1)
    return FittedEffects(
        exponents=dict(zip(names, map(float, usual + moved), strict=True)),
        log_sd=math.sqrt(float(weights @ distances**2 / weights.sum())),
    )


def _columns_of_differing_numbers(
    samples: Sequence[MeasuredSample], numbers: Mapping[str, float]
) -> tuple[list[str], Array]:
    shared = [name for name in numbers if all(name in sample.numbers for sample in samples)]
    shared.sort(key=lambda name: (name not in FIELDS, bool(_NUMBERED.fullmatch(name)), name))
    kept: dict[str, Array] = {}
    for name in shared:
        column = np.array([math.log2(sample.numbers[name]) for sample in samples])
        differs = abs(math.log2(numbers[name]) - column).max() > 0.1
        if differs and not any(_are_collinear(column, other) for other in kept.values()):
            kept[name] = column
    return [*kept], np.stack([*kept.values()], axis=1) if kept else np.zeros((len(samples), 0))


def _are_collinear(first: Array, second: Array) -> bool:
    a, b = first - first.mean(), second - second.mean()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return lengths > 1e-9 and abs(float(a @ b)) > 0.999 * lengths


# ---- weighted averages


_WIDTH = 0.06
"""The drop in similarity that divides a recipe's weight by e."""
_UNSEEN_SD = math.log(2)
_ONE_IN_TEN = 1.2816


class LogNormalEstimate(msgspec.Struct, frozen=True):
    """A log-normal quantity, with its 10th and 90th percentiles."""

    median: float
    low: float
    high: float
    log_sd: float
    recipes: int

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.log_sd**2 / 2)

    @property
    def sd(self) -> float:
        return self.mean * math.sqrt(math.expm1(self.log_sd**2))


def estimate_from_samples(samples: Sequence[MeasuredSample], numbers: Mapping[str, float]) -> LogNormalEstimate | None:
    """Estimate the distribution of a quantity. `samples` begin with the most similar recipes, which are used."""
    same = [sample for sample in samples if sample.similarity >= 1.0]
    nearest = (same or samples)[:MOST_SIMILAR]
    if not nearest:
        return None
    effects = None if same else fit_effects(samples, numbers, width=3 * _WIDTH)
    scaled = [effects.log_scale_factor(sample.numbers, numbers) if effects is not None else 0.0 for sample in nearest]
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
    return LogNormalEstimate(
        median=math.exp(middle),
        low=math.exp(middle - _ONE_IN_TEN * log_sd),
        high=math.exp(middle + _ONE_IN_TEN * log_sd),
        log_sd=log_sd,
        recipes=len(nearest),
    )


# ---- estimates


LEAST_SIMILARITY = 0.55
"""Minimum similarity of the recipes from which costs are estimated."""
MOST_SIMILAR = 5
_MOST_LOOKED_UP = 300

MeasuredSources = list[tuple[SimilarSource, Estimate]]


class RecipeEstimate(msgspec.Struct, frozen=True):
    """The estimated cost of a recipe on one kind of device, in seconds and bytes. `from_loads`, `from_runs`: the
    similar recipes whose loads and runs were measured. `why`: the reason if `run_s` is missing.
    """

    load_s: LogNormalEstimate | None = None
    resident_bytes: LogNormalEstimate | None = None
    peak_bytes: LogNormalEstimate | None = None
    run_s: LogNormalEstimate | None = None
    from_loads: tuple[SimilarSource, ...] = ()
    from_runs: tuple[SimilarSource, ...] = ()
    why: str = ""


class Estimator:
    """Estimates costs from history. `estimates_of` returns a recipe's measurements by kind of device."""

    def __init__(self, history: SourceHistory, estimates_of: Callable[[str], Mapping[str, Estimate]]) -> None:
        self._similar = SimilarSourceFinder(history)
        self._estimates_of = estimates_of

    def estimate(
        self, kind: str, *, loader: WorkloadFacts | None = None, function: WorkloadFacts | None = None
    ) -> RecipeEstimate:
        """Return the estimate. `function`: the joined facts of the function and its loader (`merge_loader_facts`)."""
        loads, _ = self._find_measured_sources(loader, kind, of_loaders=True)
        runs, why = self._find_measured_sources(function, kind, of_loaders=False)
        on_host = kind.startswith("cpu")
        resident = [Measured(float(e.resident_bytes if on_host else e.device_bytes)) for _, e in loads]
        peak = [Measured(float(e.peak_bytes if on_host else e.device_bytes)) for _, e in loads]
        load_s = [Measured(e.load_s + e.start_s, e.load_sd) for _, e in loads]
        return RecipeEstimate(
            load_s=_estimate_from_sources(loads, loader, load_s),
            resident_bytes=_estimate_from_sources(loads, loader, resident),
            peak_bytes=_estimate_from_sources(loads, loader, peak),
            run_s=_estimate_from_sources(runs, function, [e.functions[source.row.function] for source, e in runs]),
            from_loads=tuple(source for source, _ in loads[:MOST_SIMILAR]),
            from_runs=tuple(source for source, _ in runs[:MOST_SIMILAR]),
            why=why,
        )

    def _find_measured_sources(
        self, facts: WorkloadFacts | None, kind: str, *, of_loaders: bool
    ) -> tuple[MeasuredSources, str]:
        """Return the measurements of similar recipes, and the reason if nothing was found."""
        if facts is None or not (facts.text or facts.known_facts()):
            return [], ": ".join(["the source is not known", *(facts.notes[:1] if facts is not None else ())])
        similar = self._similar.find_most_similar(facts, of_loaders=of_loaders, threshold=LEAST_SIMILARITY)
        found: MeasuredSources = []
        for source in similar[:_MOST_LOOKED_UP]:
            estimate = self._estimates_of(source.row.recipe).get(kind)
            if estimate is not None and (estimate.loads if of_loaders else source.row.function in estimate.functions):
                found.append((source, estimate))
        if not similar:
            return [], f"no recipe in the history has a similarity of {LEAST_SIMILARITY:g} or more"
        if not found:
            return [], f"{len(similar)} similar recipes are in the history, and none was measured on {kind}"
        return found, ""


def _estimate_from_sources(
    found: MeasuredSources, facts: WorkloadFacts | None, values: Sequence[Measured]
) -> LogNormalEstimate | None:
    samples = [
        MeasuredSample(value.mean, value.sd, source.similarity, extract_numbers(source.row.facts))
        for (source, _), value in zip(found, values, strict=True)
        if value.mean > 0
    ]
    return estimate_from_samples(samples, extract_numbers(facts) if facts is not None else {})


def merge_loader_facts(loader: WorkloadFacts | None, function: WorkloadFacts) -> WorkloadFacts:
    """Merge the facts of a function and of its context's loader. If both have a fact, keep the more certain one."""
    if loader is None:
        return function
    known, own = loader.known_facts(), function.known_facts()
    fields = {field: fact for field, fact in known.items() if field not in own or fact.sure > own[field].sure}
    return msgspec.structs.replace(
        function,
        **fields,
        further={**loader.further, **function.further},
        notes=(*loader.notes, *function.notes),
        text=f"{loader.text}\n{function.text}",
        same=f"{loader.same} {function.same}" if loader.same and function.same else "",
    )


# ---- for the advisor


NEARLY_SAME = 0.995
"""Minimum similarity at which one recipe is enough to estimate memory."""
_NARROW = 1.5
_MANY = 5
"""Number of less similar recipes that suffice to estimate memory, if the 90th percentile of their memory is at most
`_NARROW` times the 10th percentile.
"""


@cache
def open_history() -> SourceHistory:
    return SourceHistory()


def estimate_context_loads(
    store: PerformanceStore, loader: WorkloadFacts, *, excluded_recipe: str
) -> dict[str, ContextAdvice]:
    """Return estimated load costs by kind of device, from all similar recipes except `excluded_recipe`."""
    estimator = Estimator(
        open_history(), cache(lambda recipe: {} if recipe == excluded_recipe else store.estimates(recipe))
    )
    found = {kind: estimator.estimate(kind, loader=loader) for kind in store.list_device_kinds()}
    return {kind: _make_load_advice(each, each.load_s) for kind, each in found.items() if each.load_s is not None}


def estimate_run_times(store: PerformanceStore, function: WorkloadFacts) -> dict[str, ContextAdvice]:
    estimator = Estimator(open_history(), cache(store.estimates))
    found = {kind: estimator.estimate(kind, function=function).run_s for kind in store.list_device_kinds()}
    return {kind: ContextAdvice(run_s=run.mean) for kind, run in found.items() if run is not None}


def _make_load_advice(found: RecipeEstimate, load: LogNormalEstimate) -> ContextAdvice:
    best = max((each.similarity for each in found.from_loads), default=0.0)
    memory = [found.resident_bytes, found.peak_bytes]
    narrow = [each is not None and each.high <= _NARROW * each.low for each in memory]
    many = found.resident_bytes is not None and found.resident_bytes.recipes >= _MANY
    believed = best >= NEARLY_SAME or (many and all(narrow))
    resident, peak = (int(each.high) if each is not None and believed else 0 for each in memory)
    return ContextAdvice(load_s=load.mean, resident_bytes=resident, peak_bytes=peak)


# ---- for `stoker plan`


_RECIPE = "estimated"


class EstimatedFunction:
    """Estimates for a function without measurements, with the interface of the performance store."""

    def __init__(self, function: str, by_kind: dict[str, Estimate], similar: tuple[str, ...]) -> None:
        self.similar = similar
        self._function = function
        self._by_kind = by_kind

    def recipes_of(self, function: str) -> list[RecipeRecord]:
        return [RecipeRecord(_RECIPE, tuple(self._by_kind), 0.0)] if function == self._function else []

    def estimates(self, recipe_key: str) -> dict[str, Estimate]:
        return self._by_kind if recipe_key == _RECIPE else {}


def estimate_unmeasured_function(
    file: Path, function: str, store: PerformanceStore, history: SourceHistory
) -> EstimatedFunction:
    """Return estimates for a function of a source file. Raises ConfigError if no estimate is possible."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    place, folders = str(file.resolve()), [file.resolve().parent]
    facts = extract_facts(SourceText(text, function, place), folders=folders)
    if not facts.text:
        raise ConfigError(f"{function} of {file} cannot be planned: {'; '.join(facts.notes) or 'it has no source'}")
    loader = None
    if named := find_loader(text, function):
        loader = extract_facts(SourceText(text, named[0], place), arguments=named[1], folders=folders)
    by_kind, why, similar = dict[str, Estimate](), list[str](), dict[str, None]()
    estimator = Estimator(history, store.estimates)
    for kind in store.list_device_kinds():
        found = estimator.estimate(kind, loader=loader, function=merge_loader_facts(loader, facts))
        if (run := found.run_s) is None:
            why.append(f"on {kind}, {found.why or 'nothing was found'}")
            continue
        similar |= dict.fromkeys(f"{each.row.name} (similarity {each.similarity:.2f})" for each in found.from_runs)
        load, resident, peak = found.load_s, found.resident_bytes, found.peak_bytes
        by_kind[kind] = Estimate(
            load_s=load.mean if load else 0.0,
            load_sd=load.sd if load else 0.0,
            loads=load.recipes if load else 0,
            run_s=run.mean,
            runs=run.recipes,
            functions={function: Measured(mean=run.mean, sd=run.sd, most=run.high, count=run.recipes)},
            calls={function: run.recipes},
            resident_bytes=int(resident.high) if resident else 0,
            device_bytes=0 if kind.startswith("cpu") or not peak else int(peak.high),
        )
    if not by_kind:
        reasons = "; ".join(why) or "no call was measured"
        raise ConfigError(f"no function like {function} of {file} was measured yet ({reasons}); make a short run first")
    return EstimatedFunction(function, by_kind, tuple(similar))
