"""Waiting calls of each context, and libraries with room for them.

A library is stuck while every slot of it is taken for long by the same calls.

Short calls are prefetched into libraries whose calls are known to be short (`Dispatch.window`). One of those calls may
run for hours all the same: a function's time depends on its arguments. What waits behind it goes back to the queue
then, and the library is given no backlog until a call of it ends. A timer looks for such libraries once a second while
any library has a backlog, or room for one.

A context whose calls wait is loaded elsewhere as if its *lingering* libraries were not there: those whose calls have
run for longer than a load takes, and several times as long as their functions usually do.

The load indexes of contexts, and libraries that are stuck. This file alone writes them.

Contexts that serve each other's calls: the runtimes of a family. This file alone notes which lists which.

A call names the contexts that can serve it, its own first (`CallOptions.variants`). It waits in the queue of its own
context. A library with room whose own queue is empty is asked what it takes of the queues that list its context
(`Dispatch.pull_others`), and so is every library that could serve a call that comes back. So a call whose own context
has no library waits no longer than for the first room in any other that it names.

The queues: which calls wait, and what it means for a context that calls wait, or wait no more.

This file alone puts calls into the queues of contexts and takes them out, and notes which contexts are hungry and since
when they starve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from stoker.manager.core import blame
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Group, Library, LibraryState, PilotState
from stoker.manager.core.per_context import CLOSED, FREE, FULL

STUCK_TIMER = "stuck"
STUCK_S = 1.0  # A library is stuck once its calls have taken every slot for this long, and far longer than usual
LINGERS = 4  # A call that runs this many times longer than usual has no known end


def is_lingering(now: float, library: Library, *, load_s: float) -> bool:
    """Whether calls take every slot of a library for so long that a load elsewhere may well be done before they are."""
    full = full_since(library)
    if full is None or now - full < max(STUCK_S, load_s):
        return False
    running = islice(library.held.values(), library.slots)
    usual_s = max((call.group.cost.run_s for call in running), default=library.context.run_s)
    return now - full >= LINGERS * usual_s


def full_since(library: Library) -> float | None:
    """Since when the same calls take every slot of a library; None if a slot is free."""
    place = library.slots - 1 - len(library.zombies)
    if place < 0:
        return library.ended_at
    last = next(islice(library.held.values(), place, None), None)
    return None if last is None else max(last.sent_at, library.ended_at)


# ---- libraries with room
def free_slots(manager: Manager, library: Library) -> int:
    """How many calls a library may hold: as many as its policy says, but no more than its slots while it is stuck."""
    window = manager.policies.dispatch.window(manager.state, library)
    return min(window, library.slots) if library.stuck else window


def has_room(manager: Manager, library: Library) -> bool:
    """True if a library that serves calls may hold one more."""
    load = library.load
    if load < library.slots:
        return True
    return not library.stuck and load < manager.policies.dispatch.window(manager.state, library)


def relist_library(manager: Manager, library: Library) -> bool:
    """A library may have another load, or serve calls or none: list it anew, as the last of those like it. True if it
    may be given another call."""
    index, pilot = library.context.index, library.pilot
    usable = library.state is LibraryState.READY and pilot.state is PilotState.HERE and pilot.reserved is None
    held = len(library.held)
    if not usable or (held == 1 and library.suspect is not None):
        index.drop(library)
        index.end_burst(library)
        return False
    load = held + len(library.zombies)
    if load < library.slots:
        library.stuck = False
        index.put(library, FREE)
        return True
    room = not library.stuck and load < manager.policies.dispatch.window(manager.state, library)
    waiting = load - library.slots
    if waiting == FULL and not room:
        index.put(library, CLOSED)
        return False
    index.put(library, waiting)
    if STUCK_TIMER not in manager.state.timers:
        schedule_backlog_check(manager)
    return room


def note_given(library: Library, count: int, now: float) -> None:
    """A library is given `count` calls."""
    library.context.index.gave(library, count, now)


def schedule_backlog_check(manager: Manager) -> None:
    """See after a while whether libraries get on with what they hold (`dispatch`)."""
    manager.set_timer(STUCK_TIMER, manager.state.now + STUCK_S)


def mark_stuck(manager: Manager, library: Library) -> None:
    """The calls of a library run for so long that none is to wait behind them."""
    library.stuck = True
    relist_library(manager, library)


def unmark_stuck(library: Library) -> None:
    """A call of a library has ended."""
    library.stuck = False


# ---- families
def note_variants(context: Context, others: Iterable[Context]) -> None:
    """Calls of a context list these others as well."""
    for other in others:
        if other is not context:
            context.lists[other.recipe.key] = other
            other.listed_by[context.recipe.key] = context


def forget_variants(context: Context) -> None:
    """A context is forgotten: it lists no other, and none lists it."""
    for other in context.lists.values():
        other.listed_by.pop(context.recipe.key, None)
    for other in context.listed_by.values():
        other.lists.pop(context.recipe.key, None)


def serving_contexts(group: Group) -> Iterator[Context]:
    """The contexts that can serve calls of a group: their own, then the others in the order in which they name them."""
    yield group.context
    for key in group.options.variants:
        other = group.context.lists.get(key)
        if other is not None:
            yield other


def libraries_for(context: Context) -> Iterator[Library]:
    """The libraries that calls of a context may run in: its own, then those of contexts that its calls list."""
    yield from context.libraries.values()
    for other in context.lists.values():
        yield from other.libraries.values()


# ---- queues
def enqueue(context: Context, calls: list[Call]) -> None:
    """New calls of one group wait."""
    context.queue.extend(calls)


def enqueue_in_place(call: Call) -> None:
    """A call that was sent before waits where its deadline and its arrival put it."""
    call.group.context.queue.put_back(call)


def reorder_queue(context: Context) -> None:
    """What calls of a context are expected to take has changed."""
    context.queue.reorder()


def dequeue(context: Context, group: Group, limit: int) -> list[Call]:
    """Take up to `limit` calls of one group from the head of a queue."""
    return context.queue.take(group, limit)


def dequeue_call(call: Call) -> None:
    """A waiting call leaves its queue; what that means for its context is said when it has its place (`fed`)."""
    call.group.context.queue.leave(call)


def leave_queue(manager: Manager, call: Call) -> None:
    """A waiting call leaves its queue for good: it is given to a library, or ends."""
    context = call.group.context
    context.queue.leave(call)
    note_fed(manager, context)


def demote_call(call: Call) -> None:
    """A waiting call has lost its deadline: those that can be in time go first."""
    call.group.context.queue.demote(call)


def mark_late(call: Call) -> None:
    """A call has lost its deadline before it came into a queue; one that waits there is demoted."""
    call.group.context.queue.mark_late(call)


def note_hungry(manager: Manager, context: Context) -> None:
    """A context has waiting calls: ask what to do about it, when its queue has doubled since the last time."""
    if context.recipe.key not in manager.state.hungry:
        manager.state.hungry[context.recipe.key] = context
        manager.demand_changed = True
        note_starving(manager, context)
    if context.queue.count >= context.ask_at:
        context.ask_at = 2 * context.queue.count
        manager.dirty[context] = None
        manager.demand_changed = True


def note_fed(manager: Manager, context: Context) -> None:
    """Calls have left a context's queue: it may be empty now, or so short that its growth is to be noticed again."""
    count = context.queue.count
    if not count:
        context.ask_at = 1
        context.starved_since = None
        manager.state.hungry.pop(context.recipe.key, None)
    elif 4 * count < context.ask_at:
        context.ask_at = 2 * count


def note_starving(manager: Manager, context: Context) -> None:
    """Note since when calls wait without any library that may run them being hot or on its way: those of a context, and
    of contexts whose calls list it."""
    _note_starving(manager, context)
    for other in context.listed_by.values():
        _note_starving(manager, other)


def _note_starving(manager: Manager, context: Context) -> None:
    if not context.queue.count or any(library.usable for library in libraries_for(context)):
        context.starved_since = None
    elif context.starved_since is None:
        context.starved_since = manager.state.now


def wait_again_apart(manager: Manager, call: Call) -> None:
    """A call waits again, in its place in the queue or apart, and its context has waiting calls."""
    context = call.group.context
    trial = manager.state.trials.get(call.id)
    if trial is None or not blame.is_apart(manager, call, trial):
        context.queue.put_back(call)
    else:
        context.queue.put_apart(call)
        manager.apart_due = True
    note_hungry(manager, context)
