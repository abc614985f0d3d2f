"""Evaluates a call that the manager offers to a library, from the requests of all engines on the library's devices.

Each engine writes its open requests to the board of turns (`library_turns`). A newly accepted call counts as an unread
prompt until the engine reports one more request.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from stoker.contexts.inference.adapter import EngineWork
from stoker.contexts.step_times import StepSeconds, StepTimes
from stoker.pilot.core import starting
from stoker.pilot.core.events import OfferInspected
from stoker.pilot.core.memory import token_cache
from stoker.pilot.core.state import CoreState, PilotLibrary, Stage
from stoker.pilot.core.turns import EngineOutlook, OpenAnswer, UnreadPrompt
from stoker.pilot.library.library_turns import TurnRow, TurnState, unpack_board_rows, unpack_engine_work
from stoker.protocol.ids import CallId, LibraryId
from stoker.protocol.to_pilot import RunCalls

log = logging.getLogger("stoker.pilot")

BOARD_FILE = "turns"  # name of the board, a file in the pilot's scratch folder with the engines' open requests
_STAGES_BEFORE_READY = frozenset({Stage.FETCHING, Stage.WAITING, Stage.STARTING, Stage.LOADING})
_LONGEST_STEP_S = 60.0  # a row of the board is invalid if its step ends more than 60 s from now
_READ_ATTEMPTS = 3  # attempts to read a row of the board while an engine writes the row


class OfferInspector:
    """Uses the board, the file to which each engine writes its open requests, to evaluate offered calls."""

    def __init__(self, state: CoreState, *, board: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._path = board
        self._clock = clock
        self._step_seconds: dict[int, tuple[StepTimes, StepSeconds]] = {}
        """By `id` of a table of step times: the table, and the function that computes step durations from it."""
        self._unreported_prompts: dict[LibraryId, list[tuple[CallId, UnreadPrompt]]] = {}
        """For each library, the accepted calls that its engine has not reported yet."""
        self._reported_requests: dict[LibraryId, int] = {}

    def inspect(self, order: RunCalls) -> OfferInspected:
        try:
            return self._evaluate(order)
        except Exception:  # if an offer cannot be evaluated, the pilot accepts the call
            log.exception("the offer of a call to lib-%d cannot be evaluated and is accepted", order.library)
            return OfferInspected(order)

    def _evaluate(self, order: RunCalls) -> OfferInspected:
        library, now = self._state.libraries.get(order.library), self._clock()
        if library is None or not order.calls:
            return OfferInspected(order)
        engines_here, mine = self._read_engine_work(library), set(library.devices)
        beside = [each for each in self._state.libraries.values() if not mine.isdisjoint(each.devices)]
        self._drop_prompts_taken_by_engines(engines_here)
        self._remove_old_records(beside)
        new = _unread_prompt(order, now)
        own_work = [work for row, work in engines_here if row.library == library.number]
        required, why_full = self._required_bytes(order, library, own_work)
        self._unreported_prompts.setdefault(order.library, []).append((order.calls[0].call, new))
        if why_full or self._known_step_seconds(library) is None:
            return OfferInspected(order, required_bytes=required, why_full=why_full)
        ends = [row.held_at + row.step_s for row, _ in engines_here if row.state is TurnState.HOLDS]
        free_at = max([now, *(end for end in ends if now < end < now + _LONGEST_STEP_S)])
        seen = set[LibraryId]()
        engines = list[EngineOutlook]()
        on_board = {row.library for row, _ in engines_here}
        without_row = [(other.number, EngineWork()) for other in beside if other.number not in on_board]
        for number, work in (*((row.library, work) for row, work in engines_here), *without_row):
            outlook = self._make_outlook(
                self._state.libraries[number], work, now, is_first=number not in seen, offered_order=order
            )
            seen.add(number)
            if outlook is not None:
                engines.append(outlook)
        return OfferInspected(order, new, engines, free_at, required)

    def _make_outlook(
        self, library: PilotLibrary, work: EngineWork, now: float, *, is_first: bool, offered_order: RunCalls
    ) -> EngineOutlook | None:
        cost = self._known_step_seconds(library)
        if cost is None:
            return None
        prompts = [UnreadPrompt(*prompt) for prompt in work.prompts]
        number = library.number
        if is_first:
            offered = {spec.call for spec in offered_order.calls}
            taken = self._unreported_prompts.get(number, ())
            prompts += [each for call, each in taken if call not in offered and each.due_at >= now]
            prompts.sort(key=lambda prompt: prompt.due_at)
        else:
            number = LibraryId(-1 - number)
        rows, length = work.rows, work.length
        # A library that is still starting will get a request, so count at least one request.
        if library.stage in _STAGES_BEFORE_READY and not library.must_end and not prompts:
            rows, length = max(1, rows), max(1.0, length)
        due_at, late_at = work.due_at, work.late_at
        if due_at < now:
            due_at, late_at = math.inf, min(due_at, late_at)
        answers = tuple([OpenAnswer(*answer) for answer in work.answers])
        return EngineOutlook(number, cost, rows, length, due_at, work.tpot_s, tuple(prompts), late_at, answers=answers)

    # ---- the board

    def _read_engine_work(self, library: PilotLibrary) -> list[tuple[TurnRow, EngineWork]]:
        mine, libraries = set(library.devices), self._state.libraries
        for again in reversed(range(_READ_ATTEMPTS)):
            data = self._path.read_bytes() if self._path.exists() else b""
            found = list[tuple[TurnRow, EngineWork]]()
            for row, beside in unpack_board_rows(data):
                if row.library not in libraries or mine.isdisjoint(row.devices):
                    continue
                number, work = unpack_engine_work(beside) or (0, EngineWork())
                if number != row.library and again and any(beside):
                    break  # an engine is writing the row
                found.append((row, work if number == row.library else EngineWork()))
            else:
                return found
        return found

    # ---- costs and memory

    def _known_step_seconds(self, library: PilotLibrary) -> StepSeconds | None:
        times = starting.known_step_times(self._state, library)
        if times is None:
            return None
        found = self._step_seconds.get(id(times))
        if found is None:
            kept = {id(each) for each in self._state.step_times.values()}
            self._step_seconds = {key: each for key, each in self._step_seconds.items() if key in kept}
            found = self._step_seconds[id(times)] = times, StepSeconds(times)
        return found[1]

    def _required_bytes(self, order: RunCalls, library: PilotLibrary, work: list[EngineWork]) -> tuple[int, str]:
        """Return the bytes that the engine needs per device for requests of expected lengths (SLINFER eq. 2; 0 =
        unknown), and a message if its cache of fixed size is full.
        """
        facts = self._state.devices_of(library)[0]
        measured = library.resident_bytes if facts.on_host else library.device_bytes
        cache = token_cache(library.recipe.needs, facts, library.cache, measured_bytes=measured)
        if cache is None or not work:
            return 0, ""
        features = order.calls[0].features
        own_tokens = features.input_length + features.expected_output if features is not None else 1
        tokens = sum(each.peak_tokens for each in work) + own_tokens
        if not cache.is_fixed:
            return cache.weights_bytes + cache.token_bytes * tokens, ""
        if tokens <= cache.tokens:
            return 0, ""
        return 0, (
            f"the cache of lib-{library.number} holds {cache.tokens:,} tokens and cannot be resized; with this call it"
            f" would need {tokens:,}"
        )

    def _drop_prompts_taken_by_engines(self, engines: list[tuple[TurnRow, EngineWork]]) -> None:
        counts: dict[LibraryId, int] = {}
        for row, work in engines:
            counts[row.library] = counts.get(row.library, 0) + work.accepted_requests
        for library, count in counts.items():
            more = count - self._reported_requests.get(library, 0)
            self._reported_requests[library] = count
            if more > 0 and library in self._unreported_prompts:
                del self._unreported_prompts[library][:more]

    def _remove_old_records(self, looked_at: Iterable[PilotLibrary]) -> None:
        """Remove the records of ended libraries, and of ended calls of the libraries `looked_at`."""
        libraries = self._state.libraries
        for notes in (self._unreported_prompts, self._reported_requests):
            for number in [number for number in notes if number not in libraries]:
                del notes[number]
        for library in looked_at:
            if taken := self._unreported_prompts.get(library.number):
                taken[:] = [(call, prompt) for call, prompt in taken if call in library.held_calls]


def _unread_prompt(order: RunCalls, now: float) -> UnreadPrompt:
    features, objective = order.calls[0].features, order.options.objective
    tokens = max(1, features.input_length) if features is not None else 1
    first_s = objective.first_token_s(tokens)
    most = features.most_output if features is not None else 0
    return UnreadPrompt(tokens, now - order.waited_s + first_s if first_s else math.inf, objective.tpot_s, most)
