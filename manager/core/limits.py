"""How many libraries of a context there may be, and how long an idle one stays: what several programs wish for
together. This file alone writes that into contexts.

Each program that is here is kept its word as far as that can be: the largest `least`, the smallest `most` and the
longest `keep_alive_s` hold, and `most` before `least`. After the last of them has left, what it wished for goes on to
hold until another program names limits; but `least`, which costs devices, only holds for programs that are here.
What a program that has left wished for is remembered while the session knows the program, for it may come back.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits
from stoker.manager.core.client import Client
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Context

_HONOURED = frozenset({"min_libraries", "max_libraries", "keep_alive"})


def said(manager: Manager, client: Client, context: Context, limits: LibraryLimits) -> bool:
    """A program names limits for a context, instead of those that it named before. True if others hold from now on.
    `NO_LIMITS` is no word on them; but where the policy honours no limits, it takes back what was refused."""
    if limits == NO_LIMITS:
        if not _are_honoured(manager):
            context.said_limits.pop(client.id, None)
        return False
    known = manager.state.clients
    context.said_limits = {id: each for id, each in context.said_limits.items() if id in known} | {client.id: limits}
    return _settle(manager, context)


def came_or_left(manager: Manager, client: Client) -> list[Context]:
    """A program has left, or is back. Returns the contexts for which other limits hold from now on."""
    said_some = [each for each in manager.state.contexts.values() if client.id in each.said_limits]
    return [context for context in said_some if _settle(manager, context)]


def _settle(manager: Manager, context: Context) -> bool:
    if not _are_honoured(manager):
        return False  # calls with limits are refused
    clients = manager.state.clients
    here = [each for id, each in context.said_limits.items() if id in clients and not clients[id].gone]
    limits = together(here) if here else msgspec.structs.replace(context.limits, least=0)
    if limits == context.limits:
        return False
    context.limits = limits
    return True


def _are_honoured(manager: Manager) -> bool:
    return manager.policies.residency.honours >= _HONOURED


def together(limits: Collection[LibraryLimits]) -> LibraryLimits:
    """What holds of several."""
    most = min((each.most for each in limits if each.most), default=0)
    least = max((each.least for each in limits), default=0)
    kept = [each.keep_alive_s for each in limits if each.keep_alive_s is not None]
    return LibraryLimits(min(least, most) if most else least, most, max(kept, default=None))
