"""An event made the core raise: the manager was started again without it, and this stands in its place.

The core may have done half of what the event asked for, so the live shell does not go on with it. It writes an
`EventRefused` into the journal instead of the event, and the manager comes back from its journal. What the event said
has to have an end all the same: calls that came with it fail, and a pilot whose word was lost is given up, because the
manager's picture of it is wrong from then on.
"""

from __future__ import annotations

from stoker.manager.core import departures, pilot_states
from stoker.manager.core.events import ClientGone, Event, EventRefused, FromClient, FromPilot, PilotLost, TimerFired
from stoker.manager.core.manager import Manager
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import CallId, ClientId, PilotId
from stoker.protocol.to_manager import Submit

ROUND_PAUSE_S = 60.0
"""A policy that raised in its round has its next one so much later."""
MOST_OF_ONE = 3
"""A client whose events were refused so often is refused itself."""


def refusal_of(event: Event, reason: str) -> EventRefused:
    """What stands in the journal in the place of an event that made the core raise."""
    match event:
        case FromClient(client=client, sequence=sequence, messages=messages):
            calls = [spec.call for message in messages if isinstance(message, Submit) for spec in message.calls]
            return EventRefused("client", str(client), sequence, reason, calls)
        case FromPilot(pilot=pilot, sequence=sequence):
            return EventRefused("pilot", str(pilot), sequence, reason)
        case PilotLost(pilot=pilot):
            return EventRefused("pilot", str(pilot), 0, reason)
        case ClientGone(client=client):
            return EventRefused("client", str(client), 0, reason)
        case TimerFired(key=key):
            return EventRefused("timer", key, 0, reason)
        case _:
            return EventRefused("manager", type(event).__name__, 0, reason)


def refused(manager: Manager, event: EventRefused) -> None:
    """Give what a refused event said an end."""
    state = manager.state
    state.failed_at.append(state.now)
    whose = f"the timer {event.name}" if event.role == "timer" else f"a message of {event.role} {event.name}"
    state.notice(f"the manager failed on {whose}, refused it and was started again: {event.reason}")
    match event.role:
        case "client":
            _client(manager, event)
        case "pilot":
            _ban(manager, event)
            pilot_states.lost(manager, PilotId(event.name), f"the manager failed on what it said: {event.reason}")
        case "timer":
            manager.timer_is_over(event.name)
            if event.name.startswith("round/"):
                manager.set_timer(event.name, state.now + ROUND_PAUSE_S)


def _client(manager: Manager, event: EventRefused) -> None:
    state = manager.state
    client = state.clients.get(ClientId(event.name))
    if client is None or not event.sequence:
        _ban(manager, event)
        return
    client.refusals += 1
    if client.refusals >= MOST_OF_ONE:
        _ban(manager, event)
    client.inbox.skip_to(event.sequence)
    client.last_call = max([client.last_call, *event.calls])
    failure = Failure(FailureKind.CANCELLED, f"the manager failed on the message that it came with: {event.reason}")
    ends = [CallEnd(CallId(call), False, b"", 0.0, failure) for call in event.calls if call not in state.calls]
    manager.results_of(client).extend(ends)


def _ban(manager: Manager, event: EventRefused) -> None:
    departures.ban(manager.state, event.name, f"the manager failed on what you said: {event.reason}")
