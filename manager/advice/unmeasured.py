"""What a function of a source file would cost that never ran, from similar ones that did: for `stoker plan`."""

from __future__ import annotations

from pathlib import Path

from stoker.contexts.performance import Estimate, Measured, PerformanceStore, Remembered
from stoker.errors import ConfigError
from stoker.manager.advice.estimates.estimator import Estimator, joined_facts
from stoker.manager.advice.estimates.similar import SourceHistory
from stoker.manager.advice.source.extractor import SourceText, extract_facts, loader_of

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
