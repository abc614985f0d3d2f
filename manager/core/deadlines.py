"""Deadlines under a policy that orders its queues by them (`Dispatch.by_deadline`; the default does).

Within a priority the nearest deadline comes first; calls without one come after those with one. A call is *lost* when
its deadline has passed, or when it would pass before the end of the call even if it began now and took as long as the
shortest run of its function on its context, once `KNOWN_RUNS` runs were seen. A call that is lost is dropped if its
user wants that (`late="drop"`). Else its client is told, and it stands behind the calls that can still be in time: they
would be late as well if it went first.

Calls are looked at when they come, when a library has room, and by a timer when the first one of a queue would be lost.
"""

from __future__ import annotations

from stoker.manager.core import call_records, ending, queues
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context
from stoker.protocol.calls import Failure, FailureKind
from stoker.units import show_seconds

KNOWN_RUNS = 3
"""One slow first run must not make every later call look lost."""
_SOON_S = 0.001
"""A timer that fires this much early does not ask for another one in no time."""


def came(manager: Manager, fresh: list[Call]) -> list[Call]:
    """New calls of one group have a deadline. Returns those that are to run; the others are dropped."""
    kept = []
    for call in fresh:
        if is_lost(manager.state.now, call):
            if call.group.options.objective.drop_late:
                queues.enter(call.group.context, [call])  # whatever waits is in its queue until it ends
                ending.fail(manager, call, Failure(FailureKind.DROPPED, why_lost(manager.state.now, call)))
                continue
            _tell_late(manager, call)
        kept.append(call)
    return kept


def watch(manager: Manager, context: Context) -> None:
    """Have a queue looked at when the first of its calls would be lost."""
    at = min((_latest_start(call) for call in context.queue.nearest()), default=None)
    key = f"deadline/{context.recipe.key}"
    if at is not None and at < manager.state.timers.get(key, at + 1.0):
        manager.set_timer(key, max(at, manager.state.now) + _SOON_S)


def due(manager: Manager, key: str) -> None:
    """The first call of a queue may be lost by now."""
    context = manager.state.contexts.get(key)
    if context is not None:
        settle(manager, context)
        watch(manager, context)


def settle(manager: Manager, context: Context) -> None:
    """Drop what is lost, or let it stand behind the others."""
    queue = context.queue
    while queue.timed:
        lost = [call for call in queue.nearest() if is_lost(manager.state.now, call)]
        if not lost:
            return
        for call in lost:
            if call.group.options.objective.drop_late:
                ending.fail(manager, call, Failure(FailureKind.DROPPED, why_lost(manager.state.now, call)))
            else:
                queues.demote(call)
                _tell_late(manager, call)


def is_lost(now: float, call: Call) -> bool:
    """True if a call that has not begun cannot be in time any more."""
    return not call.late and now > _latest_start(call)


def why_lost(now: float, call: Call) -> str:
    """Why a call is dropped, in words."""
    left_s = call.group.options.objective.deadline_at - now
    if left_s <= 0:
        return f"dropped: {show_seconds(-left_s)} past its deadline"
    runs_s = show_seconds(call.group.cost.least_s)
    return f"dropped: its deadline is in {show_seconds(left_s)}, and no call of its function took less than {runs_s}"


def _latest_start(call: Call) -> float:
    cost = call.group.cost
    return call.group.options.objective.deadline_at - (cost.least_s if cost.runs >= KNOWN_RUNS else 0.0)


def _tell_late(manager: Manager, call: Call) -> None:
    state = manager.state
    queues.mark_late(call)
    call.note(state.now, "cannot be in time any more; calls that can be go first")
    before = state.forecasts.get(call.id)
    if before is None or before.in_time:
        call_records.forecast(manager, call, state.now + call.group.cost.run_s, in_time=False)
