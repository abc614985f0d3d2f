"""Which calls there are, for `stoker calls`: some of each state, and how many of each there are in all.

There may be a million of them, and the manager serves calls meanwhile: waiting ones are read off the heads of the
queues, running ones from the libraries that hold them, failed ones from those that are kept for their stories.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from stoker.manager.core import failure_groups
from stoker.manager.core.nouns import Call, Context, Gang, Library
from stoker.manager.core.state import State
from stoker.protocol.calls import ListedCall, ListedState
from stoker.protocol.ids import show_call, show_library
from stoker.protocol.to_client import Calls
from stoker.units import first_words

MOST = 1000
"""So many calls of each state are listed at most."""
_MOST_EXAMINED = 10_000
"""Entries of a queue that are looked at for them."""

FAILED = ("raised an exception in your code", "ended without a result")
"""How the last word of a failed call's story begins."""
_CANCELLED = "ended without a result (cancelled)"


def list_calls(state: State, *, limit: int, only: ListedState | None) -> Calls:
    """Up to `limit` calls of each state, or of one alone: those that have run longest, the next in turn, the last that
    failed."""
    limit = max(0, min(limit, MOST))
    listers = {ListedState.RUNNING: _running, ListedState.WAITING: _waiting, ListedState.FAILED: _failed}
    calls = [
        call for kind, lister in listers.items() if only in (None, kind) for call in islice(lister(state, limit), limit)
    ]
    waiting = sum(context.queue.count for context in state.contexts.values())
    return Calls(
        state.session, len(state.calls) - waiting, waiting, state.failures, tuple(calls), failure_groups.listed(state)
    )


def _running(state: State, limit: int) -> Iterator[ListedCall]:
    longest = heapq.nsmallest(limit, _held(state, limit), key=lambda held: (held[2].sent_at, held[2].id))
    for library, ahead, call in longest:
        where = tuple(map(_place, call.holder.members if isinstance(call.holder, Gang) else (library,)))
        yield _listed(state, call, ListedState.RUNNING, state.now - call.sent_at, where=where, ahead=ahead)


def _held(state: State, limit: int) -> Iterator[tuple[Library, int, Call]]:
    """The first calls of every library, and how many are before each that it does not run yet. Of a gang's members the
    first counts."""
    for library in state.libraries.values():
        for position, call in enumerate(islice(library.held.values(), limit)):
            if not isinstance(call.holder, Gang) or call.holder.members[0] is library:
                yield library, max(0, position - library.slots + 1), call


def _waiting(state: State, limit: int) -> Iterator[ListedCall]:
    """The next of each context, by priority and then as they came, as if one device served all contexts in turn."""
    heads = [
        context.queue.first(limit, looks=_MOST_EXAMINED) for context in state.contexts.values() if context.queue.count
    ]
    for call in heapq.merge(*heads, key=lambda call: call.group.context.queue.rank(call)):
        yield _listed(state, call, ListedState.WAITING, state.now - call.submitted_at)


def _failed(state: State, limit: int) -> Iterator[ListedCall]:
    del limit  # few are kept
    for call in reversed(state.failed.values()):
        at, how = next(((at, text) for at, text in reversed(call.notes) if text.startswith(FAILED)), (0.0, ""))
        if how and not how.startswith(_CANCELLED):
            yield _listed(state, call, ListedState.FAILED, state.now - at, error=first_words(how))


def _listed(
    of: State,
    call: Call,
    state: ListedState,
    since_s: float,
    *,
    where: tuple[str, ...] = (),
    ahead: int = 0,
    error: str = "",
) -> ListedCall:
    context: Context = call.group.context
    report, forecast = of.reports.get(call.id) or of.printed.get(call.id), of.forecasts.get(call.id)
    due_at = call.group.options.objective.deadline_at
    return ListedCall(
        show_call(call.id), call.group.function.name, context.recipe.name, state, since_s, where, ahead, error,
        *((report.done, report.total, report.metric) if report is not None else (0.0, 0.0, 0.0)),
        due_in_s=due_at - of.now if due_at else None,
        ends_in_s=forecast.ends_at - of.now if forecast is not None else None,
    )  # fmt: skip


def _place(library: Library) -> str:
    return f"{library.pilot.id}/{show_library(library.id)}"
