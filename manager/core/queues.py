"""Index the libraries of each context by load, and note when its waiting calls need more libraries.

*Stuck libraries*: if a long call blocks calls that were sent to the library in advance (`Dispatch.window`), a timer
requeues the blocked calls. The library gets no more calls in advance until one of its calls ends.

*Variants*: a call may list other contexts that can serve it. The call waits in the queue of its own context. A library
with free slots and an empty queue also takes calls that list its context (`Dispatch.pull_others`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from stoker.manager.core import blame
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Group, Library
from stoker.manager.core.per_context import CLOSED, FREE, FULL

STUCK_TIMER = "stuck"
STUCK_S = 1.0  # A library is stuck if all its slots are busy for this many seconds and for `LINGERS` usual run times
LINGERS = 4  # Number of usual run times after which the end of a running call is unpredictable


def is_unlikely_to_free_slot(now: float, library: Library, *, load_s: float) -> bool:
    """Return True if loading another library is probably faster than waiting for a slot of this library."""
    full = all_slots_occupied_since(library)
    if full is None or now - full < max(STUCK_S, load_s):
        return False
    running = islice(library.held.values(), library.slots)
    usual_s = max((call.group.cost.run_s for call in running), default=library.context.run_s)
    return now - full >= LINGERS * usual_s


def all_slots_occupied_since(library: Library) -> float | None:
    place = library.slots - 1 - len(library.zombies)
    if place < 0:
        return library.ended_at
    last = next(islice(library.held.values(), place, None), None)
    return None if last is None else max(last.sent_at, library.ended_at)


def has_room(manager: Manager, library: Library) -> bool:
    load = library.load
    if load < library.slots:
        return True
    return not library.stuck and load < manager.policies.dispatch.window(manager.state, library)


def update_load_index(manager: Manager, library: Library) -> bool:
    """Update the entry of a library in the load index. Return True if the library can take more calls."""
    index, held = library.context.index, len(library.held)
    if not library.is_serving or library.pilot.reserved is not None or (held == 1 and library.suspect is not None):
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
        manager.set_timer(STUCK_TIMER, manager.state.now + STUCK_S)
    return room


def contexts_serving_group(group: Group) -> Iterator[Context]:
    yield group.context
    for key in group.options.variants:
        other = group.context.lists.get(key)
        if other is not None:
            yield other


def libraries_serving_context(context: Context) -> Iterator[Library]:
    """Yield the libraries that can run the calls of a context. The context's own libraries come first."""
    yield from context.libraries.values()
    for other in context.lists.values():
        yield from other.libraries.values()


def remove_call_from_queue(manager: Manager, call: Call) -> None:
    context = call.group.context
    context.queue.leave(call)
    record_queue_shrinkage(manager, context)


def put_call_back_in_queue(manager: Manager, call: Call) -> None:
    context = call.group.context
    trial = manager.state.trials.get(call.id)
    if trial is None or not blame.needs_special_placement(manager, call, trial):
        context.queue.put_back(call)
    else:
        context.queue.hold_back(call)
        manager.apart_due = True
    record_queue_growth(manager, context)


def record_queue_growth(manager: Manager, context: Context) -> None:
    """Record that calls wait. If the number of waiting calls has doubled, the policies decide again."""
    if context.recipe.key not in manager.state.waiting_contexts:
        manager.state.waiting_contexts[context.recipe.key] = context
        manager.demand_changed = True
        update_starved_since(manager, context)
    if context.queue.count >= context.ask_at:
        context.ask_at = 2 * context.queue.count
        manager.dirty[context] = None
        manager.demand_changed = True


def record_queue_shrinkage(manager: Manager, context: Context) -> None:
    count = context.queue.count
    if not count:
        context.ask_at = 1
        context.starved_since = None
        manager.state.waiting_contexts.pop(context.recipe.key, None)
    elif 4 * count < context.ask_at:
        context.ask_at = 2 * count


def update_starved_since(manager: Manager, changed: Context) -> None:
    for context in (changed, *changed.listed_by.values()):
        if not context.queue.count or any(library.usable for library in libraries_serving_context(context)):
            context.starved_since = None
        elif context.starved_since is None:
            context.starved_since = manager.state.now
