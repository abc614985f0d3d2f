"""Programs that leave: their calls end, and a session that stays forgets in time what only they had.

A program that was cut off may come back, so the session keeps its results and what it has defined for a day. After
that it keeps a function or a context only if another client has defined it, an open call needs it, or a library holds
it.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core import accounting, ending, feeding, limits, loads, pilot_states, registry, session_end
from stoker.manager.core.client import Client
from stoker.manager.core.commands import DiscardObject
from stoker.manager.core.manager import Manager
from stoker.manager.core.state import State
from stoker.protocol.ids import ClientId, FunctionKey
from stoker.units import show_bytes, show_seconds

KEPT_S = 86_400.0
"""A session that outlives programs keeps the results of one that is gone for a day,"""
MOST_KEPT_BYTES = 64_000_000
"""and no more bytes of them than this; files of large results are not counted."""
SETTLE_S = 60.0
"""The size is looked at so long after the client was given up, when the ends of its calls are there."""
KEPT_BANNED = 1000
"""The session remembers at most this many programs that must not come back."""


def gone(manager: Manager, id: ClientId) -> None:
    """A client did not come back: its calls end, and so does the session if no other client uses it. If the client
    comes back later, it finds how its calls ended."""
    state = manager.state
    client = state.clients.get(id)
    if client is None or client.gone:
        return
    client.gone, client.connected, client.gone_at = True, False, state.now
    if client.observer:
        registry.forget_observer(state, client)
        return
    for context in limits.came_or_left(manager, client):
        feeding.limits_changed(manager, context)
    if state.kept:
        manager.set_timer(f"gone/{id}", state.now + SETTLE_S)
    if client.open_calls:
        for call in [call for call in state.calls.values() if call.group.client is client]:
            ending.cancel(manager, call, reason="its client is gone", running=True)
    if not state.kept and all(other.gone or other.observer for other in state.clients.values()):
        session_end.end_session(manager, "its client is gone")


def gone_long(manager: Manager, id: str) -> None:
    """A client may have been gone for long: drop the results that it has not fetched, and after a day all of it. What
    is still in use then is looked at once a day."""
    state = manager.state
    client = state.clients.get(ClientId(id))
    if client is None:
        _forget_unused(manager, id)
        return
    if not client.gone:
        return
    size = sum(len(end.payload) for end in client.unacked if isinstance(end.payload, bytes))
    away_s = state.now - client.gone_at
    is_over = away_s >= KEPT_S
    if client.unacked and (is_over or size > MOST_KEPT_BYTES):
        why = f"after {show_seconds(away_s)}" if is_over else f"because they were {show_bytes(size)}"
        _drop_results(manager, client, why)
    if is_over:
        _forget(manager, client)
    else:
        manager.set_timer(f"gone/{id}", client.gone_at + KEPT_S)


def ban(state: State, name: str, why: str) -> None:
    """A peer that must not come back is told why when it tries."""
    state.banned[name] = why
    if len(state.banned) > KEPT_BANNED:
        del state.banned[next(iter(state.banned))]


def _drop_results(manager: Manager, client: Client, why: str) -> None:
    for end in client.unacked:
        if isinstance(end.payload, ObjectRef):
            manager.out.append(DiscardObject(end.payload.source))
    count = len(client.unacked)
    manager.state.notice(f"{count} results of a program that left and did not come back were dropped {why}")
    ban(manager.state, client.id, f"this program was gone for too long: its {count} results were dropped {why}")
    client.first_unacked += count
    client.unacked.clear()


def _forget(manager: Manager, client: Client) -> None:
    state = manager.state
    if client.id not in state.banned:
        ban(
            state, client.id, "this program was gone for too long: the session has forgotten it; start the program anew"
        )
    registry.forget_client(state, client)
    accounting.record_runs(manager)
    _forget_unused(manager, client.id)


def forget_functions(manager: Manager, client: Client, keys: Iterable[FunctionKey]) -> None:
    """Forget functions that their client will not name again, unless another client has defined them."""
    dropped = registry.unused_functions(manager.state, client, keys)
    if dropped:
        accounting.record_runs(manager)
        registry.forget_functions(manager.state, dropped)


def _forget_unused(manager: Manager, id: str) -> None:
    """Forget what no client has defined and nothing uses. `id`: the client whose timer looks again if some is used."""
    registry.forget_groups(manager.state)
    pilot_states.give_up_old(manager.state, kept_s=KEPT_S)
    is_used = registry.forget_unused(manager)
    loads.forget_pilots(manager.state)
    if is_used:
        manager.set_timer(f"gone/{id}", manager.state.now + KEPT_S)
