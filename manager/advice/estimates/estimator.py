"""Estimates for a recipe that was never measured, from similar ones that were: load time, run time, memory and pace.

The measurements are those of the performance store, which each session fills; history adds what the sources say. So a
recipe's key may change (an edit of a comment, another name of a variable) and nothing is forgotten: the new recipe's
source is the same once normalised, and its estimate is what the old one took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from stoker.contexts.performance import Estimate
from stoker.manager.advice.estimates.blending import ScatteredValue, blend
from stoker.manager.advice.estimates.history import SourceHistory
from stoker.manager.advice.estimates.retrieval import SimilarSource, SimilarSources
from stoker.manager.advice.estimates.scaling import MeasuredSample
from stoker.manager.advice.estimates.vectors import Encoder, numbers_of
from stoker.manager.advice.source.facts import WorkloadFacts
from stoker.manager.core.events import ContextAdvice

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
    """Asks history. `estimates_of` says what a recipe took, by device kind: `PerformanceStore.estimates`. `encoder`
    (texts to vectors) is optional; `threshold` and `most` are the paper's T and k."""

    def __init__(
        self,
        history: SourceHistory,
        estimates_of: Callable[[str], Mapping[str, Estimate]],
        *,
        encoder: Encoder | None = None,
        encoder_name: str = "encoder",
        threshold: float = THRESHOLD,
        most: int = MOST_SIMILAR,
    ) -> None:
        self._similar = SimilarSources(history, encoder=encoder, encoder_name=encoder_name)
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
