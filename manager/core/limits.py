"""How many libraries of a context there may be, and how long an idle one stays: what several programs wish for
together. This file alone writes that into contexts.

Each program that is here is kept its word as far as that can be: the largest `least`, the smallest `most` and the
longest `keep_alive_s` hold, and `most` before `least`. After the last of them has left, what it wished for goes on to
hold until another program names limits; but `least`, which costs devices, only holds for programs that are here.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits
from stoker.manager.core.client import Client
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Context
from stoker.manager.protocol.ids import ClientId

_HONOURED = frozenset({"min_libraries", "max_libraries", "keep_alive"})


def said(manager: Manager, client: Client, context: Context, limits: LibraryLimits) -> bool:
    """A program names limits for a context, instead of those that it named before. True if others hold from now on.
    `NO_LIMITS` is no word on them."""
    if limits == NO_LIMITS:
        return False
    context.said_limits = {**_of_those_here(manager, context), client.id: limits}
    return _settle(manager, context)


def left(manager: Manager, client: Client) -> list[Context]:
    """A program has left. Returns the contexts for which other limits hold from now on."""
    said_some = [each for each in manager.state.contexts.values() if client.id in each.said_limits]
    return [context for context in said_some if _settle(manager, context)]


def _settle(manager: Manager, context: Context) -> bool:
    if not manager.policies.residency.honours >= _HONOURED:
        return False  # calls with limits are refused
    here = _of_those_here(manager, context)
    context.said_limits = here or context.said_limits
    limits = together(context.said_limits.values())
    if not here:
        limits = msgspec.structs.replace(limits, least=0)
    if limits == context.limits:
        return False
    context.limits = limits
    return True


def _of_those_here(manager: Manager, context: Context) -> dict[ClientId, LibraryLimits]:
    clients = manager.state.clients
    return {id: each for id, each in context.said_limits.items() if id in clients and not clients[id].gone}


def together(limits: Collection[LibraryLimits]) -> LibraryLimits:
    """What holds of several."""
    most = min((each.most for each in limits if each.most), default=0)
    least = max((each.least for each in limits), default=0)
    kept = [each.keep_alive_s for each in limits if each.keep_alive_s is not None]
    return LibraryLimits(min(least, most) if most else least, most, max(kept, default=None))
