"""Programs that leave: their calls end, and a session that stays forgets in time what only they had.

A program that was cut off may come back, so the session keeps its results and what it has defined for a day. After
that it keeps a function or a context only if another client has defined it, an open call needs it, or a library holds
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core import accounting, ending, session_end
from stoker.manager.core.client import Client
from stoker.manager.core.commands import DiscardObject
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Context
from stoker.manager.core.state import State
from stoker.manager.protocol.ids import ClientId, FunctionKey
from stoker.units import show_bytes, show_seconds

KEPT_S = 86_400.0
"""A session that outlives programs keeps the results of one that is gone for a day,"""
MOST_KEPT_BYTES = 64_000_000
"""and no more bytes of them than this; files of large results are not counted."""
SETTLE_S = 60.0
"""The size is looked at so long after the client was given up, when the ends of its calls are there."""
KEPT_BANNED = 1000
"""The session remembers at most this many programs that must not come back."""
KEPT_NUMBERS = 10_000
"""The session remembers the numbers of at most this many clients that it has forgotten, so that calls of theirs that a
pilot still reports are not taken for calls of a program that is to come back."""


def gone(manager: Manager, id: ClientId) -> None:
    """A client did not come back: its calls end, and so does the session if no other client uses it. If the client
    comes back later, it finds how its calls ended."""
    state = manager.state
    client = state.clients.get(id)
    if client is None or client.gone:
        return
    client.gone, client.connected, client.gone_at = True, False, state.now
    if client.observer:
        del state.clients[id]
        return
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
    del state.clients[client.id], state.clients_by_number[client.number]
    state.most_pilots.pop(client.id, None)
    state.departed[client.number] = None
    if len(state.departed) > KEPT_NUMBERS:
        del state.departed[next(iter(state.departed))]
    accounting.record_runs(manager)
    _forget_unused(manager, client.id)


def forget_functions(manager: Manager, client: Client, keys: Iterable[FunctionKey]) -> None:
    """Forget functions that their client will not name again, unless another client has defined them.

    A function with open calls is kept until these have ended and a client says so of another function.
    """
    state = manager.state
    client.defined.difference_update(keys)
    state.unused_functions.update(dict.fromkeys(keys))
    defined = set[str]().union(*(each.defined for each in state.clients.values()))
    needed = {group.function.key for group in state.groups.values() if group.open_calls}
    unused = [key for key in state.unused_functions if key not in needed]
    for key in unused:
        del state.unused_functions[key]
    dropped = {key for key in unused if key not in defined}
    for key in dropped:
        state.functions.pop(key, None)
    if dropped:
        accounting.record_runs(manager)
        state.groups = {key: group for key, group in state.groups.items() if group.function.key not in dropped}
        state.costs = {key: cost for key, cost in state.costs.items() if key[0] not in dropped}


def _forget_unused(manager: Manager, id: str) -> None:
    """Forget functions and contexts that are defined by no client and in no use, and what is known of them alone.
    `id`: the client whose timer looks again if some are in use."""
    state = manager.state
    for key, group in list(state.groups.items()):
        if not group.open_calls and state.clients.get(group.client.id) is not group.client:
            del state.groups[key]
    for pilot in state.gone_pilots.values():
        if state.now - pilot.lost_at >= KEPT_S:
            pilot.kept = None
    defined = set[str]().union(*(client.defined for client in state.clients.values()))
    functions = defined.union(group.function.key for group in state.groups.values())
    contexts = defined.union(
        *((group.context.recipe.key, *group.options.variants) for group in state.groups.values()),
        (context.recipe.key for context in state.contexts.values() if context.libraries or context.queue.count),
        (
            library.context.recipe.key
            for gone in state.gone_pilots.values()
            for library, *_ in (gone.kept or {}).values()
        ),
    )
    state.functions = {key: function for key, function in state.functions.items() if key in functions}
    dropped = [context for key, context in state.contexts.items() if key not in contexts]
    for context in dropped:
        _forget_context(manager, context)
    state.costs = {
        (function, recipe): cost
        for (function, recipe), cost in state.costs.items()
        if function in state.functions and recipe in state.contexts
    }
    if dropped:
        _forget_objects(state)
    for context in state.contexts.values():
        for name in [name for name in context.failed_on if name not in state.pilots]:
            del context.failed_on[name]
    if not defined.issuperset(chain(state.functions, state.contexts)):
        manager.set_timer(f"gone/{id}", state.now + KEPT_S)


def _forget_context(manager: Manager, context: Context) -> None:
    state, key = manager.state, context.recipe.key
    del state.contexts[key]
    manager.dirty.pop(context, None)
    manager.returned.pop(context, None)
    for about in [about for about in state.transfers.snapshots if about[0] == key]:
        del state.transfers.snapshots[about]


def _forget_objects(state: State) -> None:
    transfers = state.transfers
    named = {ref.name for context in state.contexts.values() for ref in context.recipe.objects}
    named.update(each.object.name for forms in transfers.snapshots.values() for each in forms.values())
    for name, object in list(transfers.objects.items()):
        if name not in named and not object.holders and not object.fetches and name not in transfers.needy:
            del transfers.objects[name]
