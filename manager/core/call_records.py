"""What is remembered of open calls besides themselves, until they end: progress, forecasts, broken runs of gangs.

This file alone writes that. A million calls have none of it, so it stands in dicts of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker.manager.core.events import PaceAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Library
from stoker.manager.core.state import State, StreamFacts
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress
from stoker.protocol.to_client import ProgressReports


def report(state: State, progress: CallProgress) -> None:
    """A call has said how far it is."""
    state.reports[progress.call] = progress


def printed(manager: Manager, call: Call, pace: PaceAdvice) -> None:
    """A call that does not say how far it is has printed it: its client is told as if it had said so."""
    state, client = manager.state, call.group.client
    if call.id in state.reports:
        return
    said = state.printed[call.id] = CallProgress(call.id, pace.done, pace.total)
    if client.connected:
        manager.tell(client, ProgressReports([said]))


def begins_anew(state: State, call: Call) -> None:
    """A call that ran waits again: what it has printed does not tell how far its next run is."""
    state.printed.pop(call.id, None)


def stream(state: State, call: int, run: int) -> StreamFacts:
    """What is known of the pieces of a call, in this run of it."""
    facts = state.streams.get(call)
    if facts is None or facts.run != run:
        facts = state.streams[call] = StreamFacts(run)
    return facts


def forecast(manager: Manager, call: Call, ends_at: float, *, in_time: bool) -> None:
    """A call is expected to end then: its client is told when the event is over."""
    said = manager.state.forecasts[call.id] = CallForecast(call.id, ends_at, in_time)
    manager.forecasts.setdefault(call.group.client, []).append(said)


def broke(state: State, call: Call) -> int:
    """The ranks of a gang have lost each other. Returns how often they have by now."""
    breaks = state.breaks[call.id] = state.breaks.get(call.id, 0) + 1
    state.broken_runs[call.id] = call.sent_at
    return breaks


def lost_rank(state: State, call: Call) -> int:
    """A gang has lost the library of a rank, and its call is not to blame. Returns how often it was broken by now."""
    state.breaks[call.id] = state.breaks.get(call.id, 0) + 1
    return state.breaks[call.id]


def broken(state: State, library: Library, running: Iterable[int]) -> list[Call]:
    """Gang calls that a library ran when it died, and that were taken away because other ranks noticed that first."""
    here = [state.calls[id] for id in running if id in library.zombies and id in state.calls]
    # Of ranks that die together one counts; those of a run that was broken off before have nothing to do with it.
    return [call for call in here if state.broken_runs.pop(call.id, None) == call.sent_at]


def forgive(state: State, library: Library) -> None:
    """A library is lost. If other ranks of its gangs have noticed before, that was no quarrel of theirs."""
    breaks = state.breaks
    for id in library.zombies:
        if id in breaks:
            breaks[id] -= 1
            if not breaks[id]:
                del breaks[id]


def ended(state: State, call: Call) -> None:
    """A call has ended."""
    state.reports.pop(call.id, None)
    state.printed.pop(call.id, None)
    state.forecasts.pop(call.id, None)
    state.streams.pop(call.id, None)
    state.breaks.pop(call.id, None)
    state.broken_runs.pop(call.id, None)


def all_ended(state: State, ends: list[CallEnd]) -> None:
    """Calls have ended, if they are not open any more."""
    lists: tuple[dict[int, Any], ...] = (state.reports, state.printed, state.forecasts, state.streams)
    for kept in lists:
        if kept:
            for outcome in ends:
                if outcome.call not in state.calls:
                    kept.pop(outcome.call, None)
