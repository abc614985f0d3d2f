"""What the advisor answers, subject by subject. Every method may fail, and what it does not know it says nothing of."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property

from stoker.contexts.folders import state_folder
from stoker.contexts.performance import PerformanceStore
from stoker.manager.advice.judging import fault_of_call
from stoker.manager.advice.logs import Fault
from stoker.manager.advice.metrics import FollowedLog, LoggedProgress, slowdown
from stoker.manager.advice.secrets import masked
from stoker.manager.advice.source.agent import facts_with_agent
from stoker.manager.advice.source.endpoint import LanguageModel
from stoker.manager.advice.source.extractor import SourceText, extract_facts
from stoker.manager.advice.source.facts import WorkloadFacts, without_secrets
from stoker.manager.core.events import (
    AdviceArrived,
    AskAdvice,
    ContextAdvice,
    CostAdvice,
    OfContext,
    OfFailure,
    OfFunction,
    OfPace,
    PaceAdvice,
    VerdictAdvice,
)
from stoker.protocol.session import SessionFolder, read_source

log = logging.getLogger("stoker.advisor")

SIMILAR = "similar recipes"
_MOST_LOGS = 1024
_PROOF_LINES = 6
_PROOF_CHARACTERS = 400


class Advisor:
    """Answers the questions of one session."""

    def __init__(self, folder: SessionFolder, *, model: LanguageModel | None = None) -> None:
        self._folder = folder
        self._model = model
        self._followed: OrderedDict[tuple[int, int], _Followed] = OrderedDict()
        self._facts: dict[tuple[str, str], WorkloadFacts] = {}

    @cached_property
    def _store(self) -> PerformanceStore:
        return PerformanceStore(state_folder() / "performance.sqlite")

    def answer(self, question: AskAdvice) -> AdviceArrived | None:
        """What is known of a subject, or None."""
        match question.about:
            case OfContext():
                return self._on_context(question, question.about)
            case OfFunction():
                return self._on_function(question, question.about)
            case OfFailure():
                fault = fault_of_call(question.said, log=question.log, start=question.start, end=question.end)
                return AdviceArrived(question.about, _verdict(fault), "its log") if fault is not None else None
            case OfPace():
                return self._on_pace(question, question.about)

    # ---- costs

    def _on_context(self, question: AskAdvice, about: OfContext) -> AdviceArrived | None:
        loader = self._facts_of(about.recipe)
        if loader is None:
            return None
        self._remember(about.recipe, loader, name=question.name)
        if any(known.loads for known in self._store.estimates(about.recipe).values()):
            return None  # the manager has looked that up
        from stoker.manager.advice.estimating import loads_of  # numpy: not before it is needed

        return self._found(about, loads_of(self._store, loader, but=about.recipe))

    def _on_function(self, question: AskAdvice, about: OfFunction) -> AdviceArrived | None:
        measured = {
            kind: ContextAdvice(run_s=known.functions[question.name].mean, run_sd_s=known.functions[question.name].sd)
            for kind, known in self._store.estimates(about.recipe).items()
            if question.name in known.functions
        }
        function = self._facts_of(about.function)
        if function is not None:
            from stoker.manager.advice.estimating import joined, runs_of

            facts = joined(self._facts_of(about.recipe), function)
            self._remember(about.recipe, facts, name=question.name.rpartition(":")[2], function=question.name)
            if not measured:
                return self._found(about, runs_of(self._store, facts, but=(about.recipe, question.name)))
        return AdviceArrived(about, CostAdvice(measured)) if measured else None

    def _found(self, about: OfContext | OfFunction, by_kind: Mapping[str, ContextAdvice]) -> AdviceArrived | None:
        return AdviceArrived(about, CostAdvice(dict(by_kind)), SIMILAR) if by_kind else None

    def _facts_of(self, key: str) -> WorkloadFacts | None:
        found = read_source(self._folder.sources, key)
        if found is None:
            return None
        source, text = found
        known = self._facts.get((key, source.text))
        if known is None:
            entry, folders = SourceText(text, source.function, source.file), [source.folder] if source.folder else []
            if self._model is not None and folders:
                log.info("the language model at %s reads %s", masked(self._model.url), source.function)
            facts = extract_facts(entry, arguments=source.arguments, folders=folders)
            facts = facts_with_agent(entry, facts, folders=folders, model=self._model if folders else None)
            known = without_secrets(facts)
            self._facts[key, source.text] = known
            for note in known.notes:
                log.info("the source of %s: %s", source.function, note)
        return known

    def _remember(self, recipe: str, facts: WorkloadFacts, *, name: str, function: str = "") -> None:
        from stoker.manager.advice.estimating import history

        history().remember(recipe, facts, function=function, name=name)

    # ---- paces

    def _on_pace(self, question: AskAdvice, about: OfPace) -> AdviceArrived | None:
        if not question.log:
            return None
        key = (about.library, about.call)
        followed = self._followed.setdefault(key, _Followed(question.log, start=question.start))
        self._followed.move_to_end(key)
        if len(self._followed) > _MOST_LOGS:
            self._followed.popitem(last=False)
        pace = followed.current_pace()
        return AdviceArrived(about, pace, "what it prints") if pace is not None else None


class _Followed:
    """The log of a library that runs one call: its progress, and how fast it was at its best, while it evaluated and
    while it did not."""

    def __init__(self, path: str, *, start: int) -> None:
        self._log = FollowedLog(path, start=start)
        self._best: dict[bool, tuple[float, LoggedProgress]] = {}

    def current_pace(self) -> PaceAdvice | None:
        now = time.time()
        progress = self._log.track(at_s=now).progress
        if progress is None:
            return None
        at, best = self._best.get(progress.evaluates, (now, None))
        slower = slowdown(best, progress)
        if best is None or (slower is not None and slower.share < 0):
            self._best[progress.evaluates] = now, progress
        return PaceAdvice(
            progress.done,
            progress.total or 0.0,
            progress.unit,
            progress.rate_per_s or 0.0,
            progress.seconds_left or 0.0,
            max(0.0, slower.share) if slower is not None else 0.0,
            now - at,
        )


def _verdict(fault: Fault) -> VerdictAdvice:
    proof = tuple(line.text[:_PROOF_CHARACTERS] for line in fault.proof[:_PROOF_LINES])
    return VerdictAdvice(fault.kind.value, fault.component, fault.sure, fault.means, proof)
