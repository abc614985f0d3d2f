"""The advisor process. It reads the manager's questions from its channel and sends answers; threads answer slow
questions.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial

import msgspec

from stoker.config import read_sites
from stoker.contexts.folders import state_folder
from stoker.contexts.performance import PerformanceStore
from stoker.errors import ConfigError
from stoker.log_files import log_to_file
from stoker.manager.advice.endpoint import ModelEndpoint
from stoker.manager.advice.judging import Opinion, diagnose_failed_call
from stoker.manager.advice.logs.opinion import OPINION_BELOW, ask_second_opinion
from stoker.manager.advice.metrics import FollowedLog, LineFormats, LoggedProgress, compute_slowdown
from stoker.manager.advice.source.agent import add_facts_from_model
from stoker.manager.advice.source.extractor import SourceText, extract_facts
from stoker.manager.advice.source.facts import WorkloadFacts, mask_secrets_in_facts
from stoker.manager.core import events
from stoker.manager.core.events import AdviceArrived, AskAdvice, OfContext, OfFailure, OfFunction, OfPace
from stoker.protocol.session import SessionFolder, read_program_source
from stoker.site import Advice

log = logging.getLogger("stoker.advisor")

# ---- answers by subject


SIMILAR = "similar recipes"
_MOST_LOGS = 1024
_PROOF_LINES = 6
_PROOF_CHARACTERS = 400


class Advisor:
    """Answers the manager's questions about a session. `learning`: future of the last call of `learn_formats`."""

    def __init__(self, folder: SessionFolder, *, endpoint: ModelEndpoint | None = None) -> None:
        self._folder = folder
        self._endpoint = endpoint
        self._formats: LineFormats | None = None
        if endpoint is not None:
            self._formats = LineFormats(state_folder() / "sources.sqlite", model=endpoint.model.model)
        self._learning = ThreadPoolExecutor(1, thread_name_prefix="formats")
        self.learning: Future[None] | None = None
        self._followed: dict[tuple[int, int], _FollowedCall] = {}
        self._facts: dict[tuple[str, str], WorkloadFacts] = {}

    @cached_property
    def _performance_store(self) -> PerformanceStore:
        return PerformanceStore(state_folder() / "performance.sqlite")

    def answer_question(self, question: AskAdvice) -> AdviceArrived | None:
        match question.about:
            case OfContext() as about:
                return self._answer_about_context(question, about)
            case OfFunction() as about:
                return self._answer_about_function(question, about)
            case OfFailure() as about:
                return self._answer_about_failure(question, about)
            case OfPace() as about:
                return self._answer_about_pace(question, about)

    def needs_model_opinion(self, found: AdviceArrived | None) -> bool:
        verdict = found.advice if found is not None else None
        return self._endpoint is not None and isinstance(verdict, events.VerdictAdvice) and verdict.sure < OPINION_BELOW

    def answer_with_model_opinion(self, question: AskAdvice) -> AdviceArrived | None:
        assert isinstance(question.about, OfFailure)
        assert self._endpoint is not None
        return self._answer_about_failure(
            question, question.about, partial(ask_second_opinion, endpoint=self._endpoint)
        )

    def _answer_about_failure(
        self, question: AskAdvice, about: OfFailure, opinion: Opinion | None = None
    ) -> AdviceArrived | None:
        fault = diagnose_failed_call(
            question.said, log=question.log, start=question.start, end=question.end, opinion=opinion
        )
        if fault is None:
            return None
        proof = tuple(line.text[:_PROOF_CHARACTERS] for line in fault.proof[:_PROOF_LINES])
        verdict = events.VerdictAdvice(fault.kind.value, fault.component, fault.sure, fault.means, proof)
        return AdviceArrived(about, verdict, "its log")

    def _answer_about_context(self, question: AskAdvice, about: OfContext) -> AdviceArrived | None:
        loader = self._extract_facts_of_source(about.recipe)
        if loader is None:
            return None
        from stoker.manager.advice import estimating  # NumPy is imported only when needed

        estimating.open_history().store_facts(about.recipe, loader, name=question.name)
        if any(known.loads for known in self._performance_store.estimates(about.recipe).values()):
            return None  # no estimate is needed: the recipe has measurements, which the manager reads itself
        return _make_advice_from_similar_recipes(
            about, estimating.estimate_context_loads(self._performance_store, loader, excluded_recipe=about.recipe)
        )

    def _answer_about_function(self, question: AskAdvice, about: OfFunction) -> AdviceArrived | None:
        known = {
            kind: each.functions.get(question.name)
            for kind, each in self._performance_store.estimates(about.recipe).items()
        }
        measured = {kind: events.ContextAdvice(run_s=run.mean) for kind, run in known.items() if run}
        function = self._extract_facts_of_source(about.function)
        if function is not None:
            from stoker.manager.advice import estimating

            facts = estimating.merge_loader_facts(self._extract_facts_of_source(about.recipe), function)
            name = question.name.rpartition(":")[2]
            estimating.open_history().store_facts(about.recipe, facts, function=question.name, name=name)
            if not measured:
                return _make_advice_from_similar_recipes(
                    about, estimating.estimate_run_times(self._performance_store, facts)
                )
        return AdviceArrived(about, events.CostAdvice(measured)) if measured else None

    def _extract_facts_of_source(self, key: str) -> WorkloadFacts | None:
        found = read_program_source(self._folder.sources, key)
        if found is None:
            return None
        source, text = found
        if (key, source.text) not in self._facts:
            entry, folders = SourceText(text, source.function, source.file), [source.folder] if source.folder else []
            model = self._endpoint if folders else None
            if model is not None:
                log.info("the language model at %s reads the source of %s", model.name, source.function)
            facts = extract_facts(entry, arguments=source.arguments, folders=folders)
            facts = mask_secrets_in_facts(add_facts_from_model(entry, facts, folders=folders, model=model))
            self._facts[key, source.text] = facts
            for note in facts.notes:
                log.info("the source of %s: %s", source.function, note)
        return self._facts[key, source.text]

    def _answer_about_pace(self, question: AskAdvice, about: OfPace) -> AdviceArrived | None:
        if not question.log:
            return None
        key = (about.library, about.call)
        followed = self._followed.pop(key, None)
        if followed is None:
            followed = _FollowedCall(question.log, start=question.start, formats=self._formats)
        self._followed[key] = followed  # keep the order of use, because the first entry is deleted next
        if len(self._followed) > _MOST_LOGS:
            del self._followed[next(iter(self._followed))]
        pace = followed.measure_pace()
        if self._formats is not None and self._endpoint is not None:
            unread = self._formats.take_unread_formats()
            if unread:
                self.learning = self._learning.submit(self._formats.learn_formats, unread, self._endpoint)
        return AdviceArrived(about, pace, "what it prints") if pace is not None else None


def _make_advice_from_similar_recipes(
    about: OfContext | OfFunction, by_kind: Mapping[str, events.ContextAdvice]
) -> AdviceArrived | None:
    return AdviceArrived(about, events.CostAdvice(dict(by_kind)), SIMILAR) if by_kind else None


class _FollowedCall:
    """Follows the log of a library that runs one call, and remembers the call's fastest progress."""

    def __init__(self, path: str, *, start: int, formats: LineFormats | None) -> None:
        self._log = FollowedLog(path, start=start, formats=formats)
        self._best: dict[bool, tuple[float, LoggedProgress]] = {}

    def measure_pace(self) -> events.PaceAdvice | None:
        now = time.time()
        progress = self._log.track(at_s=now)
        if progress is None:
            return None
        at, best = self._best.get(progress.evaluates, (now, None))
        slower = compute_slowdown(best, progress)
        if best is None or (slower is not None and slower < 0):
            self._best[progress.evaluates] = now, progress
        return events.PaceAdvice(
            progress.done, progress.total or 0.0, progress.unit, progress.rate_per_s or 0.0,
            progress.seconds_left or 0.0, max(0.0, slower or 0.0), now - at,
        )  # fmt: skip


# ---- the channel


def serve_questions(session: str, channel: socket.socket) -> None:
    """Answer questions until the manager closes the channel, then end the process."""
    folder = SessionFolder(session)
    log_to_file(folder.path / "advisor.log")
    log.info("the advisor starts: pid %d", os.getpid())
    model = find_advice_model(folder)
    answer_until_closed(channel, Advisor(folder, endpoint=ModelEndpoint(model) if model is not None else None))
    os._exit(0)  # exit without waiting for threads that query the language model


def find_advice_model(folder: SessionFolder) -> Advice | None:
    try:
        return next((site.advice for site in read_sites(folder.sites).values() if site.advice.url), None)
    except ConfigError as error:
        log.warning("no language model is used: %s", error)
        return None


_MOST_WAITING_FAILURES = 4
"""Maximum number of failures that wait for the language model's opinion."""


def answer_until_closed(channel: socket.socket, advisor: Advisor) -> None:
    slow, failures = ThreadPoolExecutor(1, "sources"), ThreadPoolExecutor(1, "failures")
    doubted: list[Future[None]] = []
    while True:
        try:
            data = channel.recv(events.LONGEST_MESSAGE)
        except OSError:
            data = b""
        if not data:
            for pool in (slow, failures):
                pool.shutdown(wait=False, cancel_futures=True)
            return
        try:
            question = events.decode_question(data)
        except msgspec.MsgspecError as error:
            log.warning("a question cannot be read: %s", error)
            continue
        if isinstance(question.about, OfContext | OfFunction):
            slow.submit(
                lambda asked: _send_answer(channel, asked, _answer_without_raising(advisor.answer_question, asked)),
                question,
            )
            continue
        found = _answer_without_raising(advisor.answer_question, question)
        doubted = [each for each in doubted if not each.done()]
        if advisor.needs_model_opinion(found) and len(doubted) < _MOST_WAITING_FAILURES:
            doubted.append(failures.submit(_send_answer_with_opinion, channel, advisor, question, found))
        else:
            _send_answer(channel, question, found)


def _send_answer_with_opinion(
    channel: socket.socket, advisor: Advisor, question: AskAdvice, found: AdviceArrived | None
) -> None:
    _send_answer(channel, question, _answer_without_raising(advisor.answer_with_model_opinion, question) or found)


def _answer_without_raising(
    answer: Callable[[AskAdvice], AdviceArrived | None], question: AskAdvice
) -> AdviceArrived | None:
    try:
        return answer(question)
    except ImportError as error:
        log.warning(
            "the advisor cannot answer about %s: %s; install it: pip install 'stoker[advice]'", question.about, error
        )
    except Exception:  # an error in a log or source must not end the advisor
        log.exception("the advisor cannot answer about %s", question.about)
    return None


def _send_answer(channel: socket.socket, question: AskAdvice, found: AdviceArrived | None) -> None:
    try:
        channel.send(events.encode(events.Answer(question.about, found)))
    except OSError as error:
        log.info("an answer could not be sent to the manager: %s", error)
