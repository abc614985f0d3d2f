"""Shadow validation in the manager (SLINFER §VI-C), for cases that no pilot can check.

The manager checks three cases. Would a new instance serve a call in time ("the same validation procedure", §V)? Will a
loading instance serve its waiting calls in time? Will the calls of a preempted instance meet their objectives elsewhere
(§VIII-A)? The manager runs the simulation of the pilots (`stoker.pilot.core.turns.refuse_if_late`) on an estimate of
the engines' work. After its prompt was read, a call is assumed to generate one token per decode cycle of its device. If
several calls would move, each check includes what the other calls need on the new device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from stoker.contexts.step_times import StepSeconds, StepTimes
from stoker.manager.core.nouns import Call, CallState, Context, Device, Library, LibraryState
from stoker.manager.core.seams import View
from stoker.pilot.core.turns import STEP_TIME_MARGIN, EngineOutlook, OpenAnswer, UnreadPrompt, refuse_if_late
from stoker.protocol.calls import Features
from stoker.protocol.ids import LibraryId

LEAST_REMAINING_LOAD_S = 0.1  # A running load is assumed to take at least this much longer

_NEW = LibraryId(-1)  # Id of the instance that is not loaded yet


_NO_FEATURES = Features()


def _features(call: Call) -> Features:
    return call.spec.features or _NO_FEATURES


def count_prompt_tokens(call: Call) -> int:
    return max(1, _features(call).input_length)


def expected_output_tokens(call: Call) -> int:
    """Return a call's expected output tokens: the mean of its context's ended calls (§VII-A)."""
    return _features(call).expected_output


def list_unstopped_libraries(device: Device) -> list[Library]:
    return [library for library in device.libraries.values() if library.state is not LibraryState.STOPPING]


def ttft_objective_s(call: Call) -> float:
    return call.group.options.objective.first_token_s(_features(call).input_length)


def seconds_until_first_token_due(view: View, call: Call) -> float:
    """Return the seconds until a call's first token is due, without load time (§IX-A); infinity if evicted."""
    wanted_s = ttft_objective_s(call)
    return math.inf if call.id in view.reports or not wanted_s else call.submitted_at + wanted_s - view.now


def longest_cold_start_s(view: View, call: Call) -> float:
    """Return the seconds of the longest load that a call may have waited for; 0 if no load ran since it arrived."""
    longest_s = 0.0
    for library in call.group.context.libraries.values():
        if library.state is LibraryState.LOADING and library.is_usable:
            context, loads_s = library.context, view.now - library.started_at + LEAST_REMAINING_LOAD_S
            longest_s = max(longest_s, loads_s, context.wake_s if library.is_waking else context.load_s)
        elif library.state is LibraryState.READY and library.ready_at > call.submitted_at:
            longest_s = max(longest_s, library.ready_at - library.started_at)
    return longest_s


class Shadow:
    """An assumed future, in which the libraries `leaving` have stopped and calls have moved to other devices."""

    def __init__(self, leaving: Iterable[LibraryId] = ()) -> None:
        self.leaving = frozenset(leaving)
        self.moved: dict[Device, dict[Context, list[tuple[Call, UnreadPrompt]]]] = {}
        self.grown_bytes: dict[Device, dict[Context, int]] = {}  # Bytes that instances gain from moved calls

    def copy_without_library(self, library: LibraryId) -> Shadow:
        other = Shadow(self.leaving | {library})
        for device, moved in self.moved.items():
            other.moved[device] = {context: list(calls) for context, calls in moved.items()}
            other.grown_bytes[device] = dict(self.grown_bytes[device])
        return other

    def moved_calls(self, device: Device, context: Context) -> list[Call]:
        return [call for call, _ in self.moved.get(device, {}).get(context, ())]

    def moved_prompts(self, device: Device) -> dict[Context, list[UnreadPrompt]]:
        return {context: [prompt for _, prompt in calls] for context, calls in self.moved.get(device, {}).items()}

    def devices(self, context: Context) -> list[Device]:
        return [device for device, moved in self.moved.items() if context in moved]

    def room_bytes(self, device: Device, *, except_for: Context) -> int:
        taken = self.grown_bytes.get(device, {})
        return device.budget_bytes - sum(size for context, size in taken.items() if context is not except_for)

    def move(self, call: Call, device: Device, prompt: UnreadPrompt, *, added_bytes: int) -> None:
        """Assume that a call has moved. `added_bytes`: bytes by which the instance of its context grows."""
        context = call.group.context
        self.moved.setdefault(device, {}).setdefault(context, []).append((call, prompt))
        self.grown_bytes.setdefault(device, {})[context] = added_bytes


class ComputeOutlook:
    def __init__(self) -> None:
        self._step_seconds: dict[int, tuple[StepTimes, StepSeconds]] = {}
        """Seconds per step by the `id` of their table, because contexts of one model share a table."""
        self._computed_at = -1.0
        self._cycles_s: dict[Device, float] = {}
        self._outlooks: dict[int, tuple[int, EngineOutlook | None]] = {}
        """By library: number of its calls, and forecast of its work, both at time `_computed_at`."""

    def step_seconds(self, context: Context, device: Device) -> StepSeconds | None:
        advice = context.advice.get(device.facts.kind)
        times = advice.steps if advice is not None else None
        if times is None or not times.prefill or not times.decode:
            return None
        known = self._step_seconds.get(id(times))
        if known is None or known[0] is not times:  # a later table may get the same id
            known = self._step_seconds[id(times)] = times, StepSeconds(times)
        return known[1]

    def decode_s(self, library: Library) -> float:
        rows = len(library.held)
        cost = self.step_seconds(library.context, library.devices[0]) if rows else None
        if cost is None:
            return 0.0
        tokens = sum(count_prompt_tokens(call) + expected_output_tokens(call) / 2 for call in library.held.values())
        return STEP_TIME_MARGIN * cost.decode_s(rows, tokens / rows)[0]

    def cycle_s(self, device: Device, *, now: float) -> float:
        """Return the seconds that one decode step of every library on a device takes in total."""
        self._clear_outdated(now)
        known = self._cycles_s.get(device)
        if known is None:
            known = self._cycles_s[device] = sum(self.decode_s(library) for library in list_unstopped_libraries(device))
        return known

    def calls_by_longest_headroom(self, view: View, library: Library) -> list[Call]:
        """Return a library's calls, longest headroom first (eq. 1)."""
        device = library.devices[0]
        cost, cycle_s = self.step_seconds(library.context, device), self.cycle_s(device, now=view.now)
        dues_at = {
            call.id: _next_token_due_at(
                call,
                library,
                written=_estimate_generated_tokens(call, cost, cycle_s=cycle_s, now=view.now) if cost else 0,
            )
            for call in library.held.values()
        }
        return sorted(library.held.values(), key=lambda call: -dues_at[call.id])

    def is_prefill_too_slow(self, device: Device, call: Call, *, left_s: float) -> bool:
        cost, tokens = self.step_seconds(call.group.context, device), count_prompt_tokens(call)
        prefill_s = STEP_TIME_MARGIN * cost.prefill_s(tokens, tokens / 2) if cost is not None else 0.0
        return prefill_s > left_s

    def would_exceed_tpot(self, device: Device, call: Call, *, now: float) -> bool:
        """Return True if one decode step of each library and of a new instance takes longer than the call's TPOT."""
        cost, tpot_s = self.step_seconds(call.group.context, device), call.group.options.objective.tpot_s
        if cost is None or not tpot_s or _features(call).most_output:
            return False
        return (
            self.cycle_s(device, now=now) + STEP_TIME_MARGIN * cost.decode_s(1, count_prompt_tokens(call))[0] > tpot_s
        )

    def is_in_time(self, view: View, device: Device, call: Call, shadow: Shadow) -> bool:
        """Return True if a device would serve a call in time, and its other calls stay in time (§VI-C)."""
        context = call.group.context
        cost = self.step_seconds(context, device)
        if cost is None:
            return True
        joined = shadow.moved_prompts(device)
        engines, to = list[EngineOutlook](), _NEW
        for library in list_unstopped_libraries(device):
            if library.id in shadow.leaving:
                continue
            found, more = self._outlook(library, now=view.now), joined.pop(library.context, ())
            if library.context is context:
                to = library.id
            elif found is not None and not more and library.state is LibraryState.LOADING:
                found = replace(found, rows=1, length=1.0)  # assume one request that arrives after the load
            if found is not None:
                engines.append(_add_prompts(found, more))
        for number, (other, prompts) in enumerate(joined.items()):
            of_other = self.step_seconds(other, device)
            if of_other is not None:
                own = other is context
                engines.append(_add_prompts(EngineOutlook(_NEW if own else LibraryId(-2 - number), of_other), prompts))
        if to == _NEW and context not in joined:
            engines.append(EngineOutlook(_NEW, cost))
        prompt = make_unread_prompt(call, view.now + seconds_until_prompt_due(view, call))
        return refuse_if_late(engines, to, prompt, now=view.now, free_at=view.now) is None

    def _outlook(self, library: Library, *, now: float) -> EngineOutlook | None:
        self._clear_outdated(now)
        known = self._outlooks.get(library.id)
        if known is None or known[0] != len(library.held):
            known = self._outlooks[library.id] = len(library.held), self._estimate_work(library, now=now)
        return known[1]

    def _estimate_work(self, library: Library, *, now: float) -> EngineOutlook | None:
        cost = self.step_seconds(library.context, library.devices[0])
        if cost is None:
            return None
        cycle_s = self.cycle_s(library.devices[0], now=now)
        rows, length, dues_at, tpot_s = 0, 0, [math.inf], 0.0
        prompts, answers = list[UnreadPrompt](), list[OpenAnswer]()
        for call in library.held.values():
            written = _estimate_generated_tokens(call, cost, cycle_s=cycle_s, now=now)
            due_at = _next_token_due_at(call, library, written=written)
            if not written:
                prompts.append(make_unread_prompt(call, due_at))
                continue
            rows += 1
            length += count_prompt_tokens(call) + written
            each_s = call.group.options.objective.tpot_s
            if most := _features(call).most_output:
                answers.append(OpenAnswer(due_at, each_s, max(1, most - written)))
            if each_s:
                dues_at.append(due_at)
                tpot_s = min(tpot_s, each_s) if tpot_s else each_s
        prompts.sort(key=lambda prompt: prompt.due_at)
        soonest = min(at for at in dues_at if at >= now)
        late_at = min((at for at in dues_at if at < now), default=math.inf)
        mean, soon = length / rows if rows else 0.0, tuple(prompts)
        return EngineOutlook(library.id, cost, rows, mean, soonest, tpot_s, soon, late_at, answers=tuple(answers))

    def _clear_outdated(self, now: float) -> None:
        if now != self._computed_at:
            self._computed_at = now
            self._cycles_s.clear()
            self._outlooks.clear()


def _estimate_generated_tokens(call: Call, cost: StepSeconds, *, cycle_s: float, now: float) -> int:
    """Return how many tokens a call in an instance has probably generated (O of eq. 1); 0 while its prompt is read."""
    tokens = count_prompt_tokens(call)
    decodes_s = now - call.sent_at - STEP_TIME_MARGIN * cost.prefill_s(tokens, tokens / 2)
    return 1 + int(decodes_s / cycle_s) if decodes_s >= 0 and cycle_s else 0


def make_unread_prompt(call: Call, due_at: float) -> UnreadPrompt:
    return UnreadPrompt(
        count_prompt_tokens(call), due_at, call.group.options.objective.tpot_s, _features(call).most_output
    )


def seconds_until_prompt_due(view: View, call: Call) -> float:
    """Return the seconds until a call's prompt must be read on its next device (O = 0 in eq. 1)."""
    holder = call.holder
    if call.state is CallState.WAITING or not isinstance(holder, Library):
        return seconds_until_first_token_due(view, call)
    return _next_token_due_at(call, holder, written=0) - view.now


def _next_token_due_at(call: Call, library: Library, *, written: int) -> float:
    """Return when the next token of a held call is due (eq. 1), including the load time (§IX-A); infinity = never."""
    objective, wanted_s = call.group.options.objective, ttft_objective_s(call)
    if not wanted_s or (written and not objective.tpot_s):
        return math.inf
    load_s = library.ready_at - library.started_at if call.submitted_at < library.ready_at else 0.0
    return call.submitted_at + load_s + wanted_s + objective.tpot_s * written


def _add_prompts(engine: EngineOutlook, more: Iterable[UnreadPrompt]) -> EngineOutlook:
    prompts = sorted((*engine.prompts, *more), key=lambda prompt: prompt.due_at)
    return replace(engine, prompts=tuple(prompts)) if more else engine
