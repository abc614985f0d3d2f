"""Estimates of loads and runs from similar recipes, by kind of device. Apart, because NumPy takes a while to import."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stoker.contexts.performance import Estimate, Measured, PerformanceStore, Remembered
from stoker.errors import ConfigError
from stoker.manager.advice.estimates.estimator import Estimator, RetrievedEstimate, joined_facts
from stoker.manager.advice.estimates.similar import SourceHistory
from stoker.manager.advice.source.extractor import SourceText, extract_facts, loader_of
from stoker.manager.advice.source.facts import WorkloadFacts
from stoker.manager.core.events import ContextAdvice

# ---- for the advisor


SAME = 0.995
"""A recipe of this similarity is the same source with the same arguments: what it took in memory is believed."""
_NARROW = 1.5
_MANY = 5
"""Of other recipes memory is believed if so many agree within a factor: a load that is promised too little fails."""

joined = joined_facts


@cache
def history() -> SourceHistory:
    """The sources that this user's sessions have seen."""
    return SourceHistory()


def loads_of(store: PerformanceStore, loader: WorkloadFacts, *, but: str) -> dict[str, ContextAdvice]:
    """What a load takes, and holds, by kind of device. `but`: the recipe itself."""
    estimates = _estimator(store, but=(but, None))
    found = {kind: estimates.estimate(kind, loader=loader) for kind in store.kinds()}
    return {kind: _load(each) for kind, each in found.items() if each.load_s is not None}


def runs_of(store: PerformanceStore, function: WorkloadFacts, *, but: tuple[str, str]) -> dict[str, ContextAdvice]:
    """What a call takes, by kind of device. `but`: recipe and function themselves."""
    estimates = _estimator(store, but=but)
    found = {kind: estimates.estimate(kind, function=function) for kind in store.kinds()}
    return {
        kind: ContextAdvice(run_s=each.run_s.mean, run_sd_s=each.run_s.sd)
        for kind, each in found.items()
        if each.run_s is not None
    }


def _load(found: RetrievedEstimate) -> ContextAdvice:
    said = found.as_advice()
    best = max((each.similarity for each in found.from_loads), default=0.0)
    resident, peak = found.resident_bytes, found.peak_bytes
    agree = resident is not None and resident.recipes >= _MANY and resident.high <= _NARROW * resident.low
    believed = best >= SAME or (agree and peak is not None and peak.high <= _NARROW * peak.low)
    return ContextAdvice(
        load_s=said.load_s,
        load_sd_s=said.load_sd_s,
        resident_bytes=said.resident_bytes if believed else 0,
        peak_bytes=said.peak_bytes if believed else 0,
    )


def _estimator(store: PerformanceStore, *, but: tuple[str, str | None]) -> Estimator:
    known: dict[str, dict[str, Estimate]] = {}

    def estimates_of(recipe: str) -> dict[str, Estimate]:
        if recipe not in known:
            known[recipe] = store.estimates(recipe)
        return known[recipe]

    return Estimator(history(), lambda recipe: {} if (recipe, None) == but else estimates_of(recipe))


# ---- for `stoker plan`


_RECIPE = "estimated"


class EstimatedFunction:
    """Stands where the performance store does, for one function that was not measured. `similar`: what it rests on, the
    most similar first, in words."""

    def __init__(self, function: str, by_kind: dict[str, Estimate], similar: tuple[str, ...]) -> None:
        self.similar = similar
        self._function = function
        self._by_kind = by_kind

    def recipes_of(self, function: str) -> list[Remembered]:
        """The one estimate, as if it had been measured."""
        return [Remembered(_RECIPE, tuple(self._by_kind), 0.0)] if function == self._function else []

    def estimates(self, recipe_key: str) -> dict[str, Estimate]:
        """It, by kind of device."""
        return self._by_kind if recipe_key == _RECIPE else {}


def estimated(file: Path, function: str, store: PerformanceStore, history: SourceHistory) -> EstimatedFunction:
    """Estimates for a function of a source file and its loader. Raises ConfigError that says why there are none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    folders = [file.resolve().parent]
    facts = extract_facts(SourceText(text, function, str(file.resolve())), folders=folders)
    if not facts.text:
        raise ConfigError(f"{function} of {file} cannot be planned: {'; '.join(facts.notes) or 'it has no source'}")
    named = loader_of(text, function)
    loader = None
    if named is not None:
        source = SourceText(text, named.loader, str(file.resolve()))
        loader = extract_facts(source, arguments=named.arguments, folders=folders)
    by_kind, why, similar = dict[str, Estimate](), list[str](), dict[str, None]()
    estimator = Estimator(history, store.estimates)
    for kind in store.kinds():
        found = estimator.estimate(kind, loader=loader, function=joined_facts(loader, facts))
        if found.run_s is None:
            why.append(f"on {kind}, {found.why.get('run_s', 'nothing was found')}")
            continue
        load, run = found.load_s, found.run_s
        similar |= dict.fromkeys(f"{each.name} (similarity {each.similarity:.2f})" for each in found.from_runs)
        by_kind[kind] = Estimate(
            load_s=load.mean if load else 0.0,
            load_sd=load.sd if load else 0.0,
            loads=load.recipes if load else 0,
            run_s=run.mean,
            run_sd=run.sd,
            runs=run.recipes,
            functions={function: Measured(mean=run.mean, sd=run.sd, most=run.high, count=run.recipes)},
            calls={function: run.recipes},
            resident_bytes=int(found.resident_bytes.high) if found.resident_bytes else 0,
            device_bytes=0 if kind.startswith("cpu") or not found.peak_bytes else int(found.peak_bytes.high),
        )
    if not by_kind:
        raise ConfigError(
            f"nothing like {function} of {file} was measured yet ({'; '.join(why) or 'no call of anything was'});"
            " make a short run first"
        )
    return EstimatedFunction(function, by_kind, tuple(similar))
