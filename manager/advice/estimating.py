"""Estimates of loads and runs from similar recipes, by kind of device. Apart, because NumPy takes a while to import."""

from __future__ import annotations

from functools import cache

from stoker.contexts.performance import Estimate, PerformanceStore
from stoker.manager.advice.estimates.estimator import Estimator, RetrievedEstimate, joined_facts
from stoker.manager.advice.estimates.similar import SourceHistory
from stoker.manager.advice.source.facts import WorkloadFacts
from stoker.manager.core.events import ContextAdvice

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
