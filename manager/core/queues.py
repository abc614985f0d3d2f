"""The queues: which calls wait, and what it means for a context that calls wait, or wait no more.

This file alone puts calls into the queues of contexts and takes them out, and notes which contexts are hungry and since
when they starve.
"""

from __future__ import annotations

from stoker.manager.core import judging, variants
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Group


def enter(context: Context, calls: list[Call]) -> None:
    """New calls of one group wait."""
    context.queue.extend(calls)


def put_in_place(call: Call) -> None:
    """A call that was sent before waits where its deadline and its arrival put it."""
    call.group.context.queue.put_back(call)


def reorder(context: Context) -> None:
    """What calls of a context are expected to take has changed."""
    context.queue.reorder()


def take(context: Context, group: Group, limit: int) -> list[Call]:
    """Take up to `limit` calls of one group from the head of a queue."""
    return context.queue.take(group, limit)


def take_out(call: Call) -> None:
    """A waiting call leaves its queue; what that means for its context is said when it has its place (`fed`)."""
    call.group.context.queue.leave(call)


def leave(manager: Manager, call: Call) -> None:
    """A waiting call leaves its queue for good: it is given to a library, or ends."""
    context = call.group.context
    context.queue.leave(call)
    fed(manager, context)


def demote(call: Call) -> None:
    """A waiting call has lost its deadline: those that can be in time go first."""
    call.group.context.queue.demote(call)


def mark_late(call: Call) -> None:
    """A call has lost its deadline before it came into a queue; one that waits there is demoted."""
    call.group.context.queue.mark_late(call)


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
    """Calls have left a context's queue: it may be empty now, or so short that its growth is to be noticed again."""
    count = context.queue.count
    if not count:
        context.ask_at = 1
        context.starved_since = None
        manager.state.hungry.pop(context.recipe.key, None)
    elif 4 * count < context.ask_at:
        context.ask_at = 2 * count


def starving(manager: Manager, context: Context) -> None:
    """Note since when calls wait without any library that may run them being hot or on its way: those of a context, and
    of contexts whose calls list it."""
    _note_starving(manager, context)
    for other in context.listed_by.values():
        _note_starving(manager, other)


def _note_starving(manager: Manager, context: Context) -> None:
    if not context.queue.count or any(library.usable for library in variants.libraries_for(context)):
        context.starved_since = None
    elif context.starved_since is None:
        context.starved_since = manager.state.now


def come_back(manager: Manager, call: Call) -> None:
    """A call waits again, in its place in the queue or apart, and its context has waiting calls."""
    context = call.group.context
    trial = manager.state.trials.get(call.id)
    if trial is None or not judging.is_apart(manager, call, trial):
        context.queue.put_back(call)
    else:
        context.queue.put_apart(call)
        manager.apart_due = True
    hungry(manager, context)
