"""The session ends: every call that is left ends, and pilots and the manager are told to go."""

from __future__ import annotations

from stoker.manager.core import accounting, block_orders, ending, holding, sending
from stoker.manager.core.commands import EndManager
from stoker.manager.core.manager import Manager
from stoker.manager.core.phases import CallState
from stoker.protocol import to_client
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.to_pilot import Exit


def end_session(manager: Manager, reason: str) -> None:
    """End every call that is left, let the pilots go, and stop the manager."""
    state = manager.state
    if state.ending:
        return
    state.ending = reason
    failure = Failure(FailureKind.CANCELLED, f"the session ended before it was done: {reason}")
    for call in list(state.calls.values()):
        if call.state is CallState.HELD:
            holding.withdraw(manager, call, running=True)
        ending.fail(manager, call, failure)
    sending.results(manager)
    holding.forget_unsent(manager)
    for pilot in state.pilots.values():
        manager.say(pilot, Exit(reason))
    accounting.record_runs(manager)
    block_orders.session_over(manager)
    for client in state.clients.values():
        if client.connected:
            manager.tell(client, to_client.SessionOver(reason))
    manager.out.append(EndManager(reason))
