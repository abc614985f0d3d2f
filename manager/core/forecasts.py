"""What policies expect of calls with deadlines, and when their clients are told.

A policy may think anew in every round; a person wants to hear that a job will be late as soon as that is known, and
then only what has changed: whether it is in time, or its end by more than the forecast can be trusted for
(`forecast_tolerance_s`: a tenth of the time until then, a second at least). An end that is behind the deadline by less
is not provably late: such a call counts as one that is in time. While nothing like a call has been measured, nothing is
said of it.
"""

from __future__ import annotations

from stoker.manager.core import call_records
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call
from stoker.manager.core.seams import Forecast, PolicyError
from stoker.protocol.calls import CallForecast
from stoker.protocol.to_client import Forecasts
from stoker.units import forecast_tolerance_s


def note(manager: Manager, action: Forecast) -> None:
    """A policy says what it expects of a call."""
    state = manager.state
    call = state.calls.get(action.call)
    if call is None:
        raise PolicyError(f"there is no call {action.call}")
    if not _is_known(call):
        return
    due_at = call.group.options.objective.deadline_at
    in_time = action.in_time or bool(due_at and is_in_time(action.ends_at, due_at=due_at, now=state.now))
    if not has_changed(state.forecasts.get(call.id), action.ends_at, in_time=in_time, now=state.now):
        return
    call_records.forecast(manager, call, action.ends_at, in_time=in_time)


def is_in_time(ends_at: float, *, due_at: float, now: float) -> bool:
    """True unless a call that is expected to end then is provably late. `due_at`: 0 = it has no deadline."""
    return not due_at or ends_at - due_at < forecast_tolerance_s(ends_at - now)


def has_changed(before: CallForecast | None, ends_at: float, *, in_time: bool, now: float) -> bool:
    """True if a forecast differs from the one that was told by more than its tolerance."""
    if before is None or before.in_time != in_time:
        return True
    return abs(ends_at - before.ends_at) > forecast_tolerance_s(before.ends_at - now)


def _is_known(call: Call) -> bool:
    """True if something like this call was measured. A policy may name an end without that."""
    context = call.group.context
    of_others = context.recipe.loader and context.run_s  # all functions' that want no context are in one
    return bool(context.paces.measured or call.group.cost.run_s or of_others)


def send(manager: Manager) -> None:
    """Tell the clients that are connected, at the end of an event."""
    fresh, manager.forecasts = manager.forecasts, {}
    for client, said in fresh.items():
        if client.connected:
            manager.tell(client, Forecasts(said, manager.state.now))
