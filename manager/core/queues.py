"""Queues of waiting calls, and what it means for a context that calls wait, or wait no more."""

from __future__ import annotations

from stoker.manager.core import judging
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context


def hungry(manager: Manager, context: Context) -> None:
    """A context has waiting calls: ask what to do about it, when its queue has doubled since the last time."""
    if context.recipe.key not in manager.state.hungry:
        manager.state.hungry[context.recipe.key] = context
        manager.demand_changed = True
        starving(manager, context)
    if context.queue.count >= context.ask_at:
        context.ask_at = 2 * context.queue.count
        manager.dirty[context] = None
        manager.demand_changed = True


def fed(manager: Manager, context: Context) -> None:
    """Calls have left a context's queue: it may be empty now, or so short that its growing again is news."""
    count = context.queue.count
    if not count:
        context.ask_at = 1
        context.starved_since = None
        manager.state.hungry.pop(context.recipe.key, None)
    elif 4 * count < context.ask_at:
        context.ask_at = 2 * count


def starving(manager: Manager, context: Context) -> None:
    """Note since when a context's calls wait without any library of theirs being hot or on its way."""
    if not context.queue.count or any(library.usable for library in context.libraries.values()):
        context.starved_since = None
    elif context.starved_since is None:
        context.starved_since = manager.state.now


def put_back(manager: Manager, call: Call) -> None:
    """A call waits again: in its place in the queue, or apart."""
    queue = call.group.context.queue
    trial = manager.state.trials.get(call.id)
    if trial is None or not judging.is_apart(manager, call, trial):
        queue.put_back(call)
    else:
        queue.put_apart(call)
        manager.apart_due = True
