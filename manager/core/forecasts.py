"""What policies expect of calls with deadlines, and when their clients are told.

A policy may think anew in every round; a person wants to hear that a job will be late as soon as that is known, and
then only what has changed: whether it is in time, or its end by more than a tenth of the time until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.manager.core.seams import Forecast, PolicyError
from stoker.manager.protocol.calls import CallForecast
from stoker.manager.protocol.to_client import Forecasts

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

_CHANGE = 0.1


def note(core: Core, action: Forecast) -> None:
    """A policy says what it expects of a call."""
    state = core.state
    call = state.calls.get(action.call)
    if call is None:
        raise PolicyError(f"there is no call {action.call}")
    before = state.forecasts.get(call.id)
    if before is not None and before.in_time == action.in_time:
        left_s = max(1.0, before.ends_at - state.now)
        if abs(action.ends_at - before.ends_at) <= _CHANGE * left_s:
            return
    state.forecasts[call.id] = said = CallForecast(call.id, action.ends_at, action.in_time)
    core.forecasts.setdefault(call.group.client, []).append(said)


def send(core: Core) -> None:
    """Tell the clients that are connected, at the end of an event."""
    fresh, core.forecasts = core.forecasts, {}
    for client, said in fresh.items():
        if client.connected:
            core.tell(client, Forecasts(said))
