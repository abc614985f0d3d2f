"""Sort the libraries of each context by their number of calls, and note when waiting calls need more libraries.

*Stuck libraries*: a library may hold more calls than it has slots (`Dispatch.window`). If long calls occupy all slots,
a timer requeues the calls behind them. Until one of its calls ends, the library gets no more calls than free slots.

*Variants*: a call may list other contexts that can serve it. The call waits in the queue of its own context. A library
with free slots and an empty queue also takes calls that list its context (`Dispatch.pull_others`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from stoker.manager.core import blame
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallGroup, Context, Library
from stoker.manager.core.per_context import CLOSED, FREE, FULL

STUCK_TIMER = "stuck"
# A library is stuck if all its slots are busy for this many seconds and for `LONG_RUN_FACTOR` usual run times.
STUCK_AFTER_S = 1.0
LONG_RUN_FACTOR = 4  # If a call takes longer than this many usual run times, its end cannot be predicted


def is_unlikely_to_free_slot(now: float, library: Library, *, load_s: float) -> bool:
    """Return True if loading another library is probably faster than waiting for a free slot of this library."""
    full = all_slots_occupied_since(library)
    if full is None or now - full < max(STUCK_AFTER_S, load_s):
        return False
    running = islice(library.held.values(), library.slots)
    usual_s = max((call.group.cost.run_s for call in running), default=library.context.run_s)
    return now - full >= LONG_RUN_FACTOR * usual_s


def all_slots_occupied_since(library: Library) -> float | None:
    place = library.slots - 1 - len(library.withdrawn_calls)
    if place < 0:
        return library.ended_at
    last = next(islice(library.held.values(), place, None), None)
    return None if last is None else max(last.sent_at, library.ended_at)


def has_room(manager: Manager, library: Library) -> bool:
    load = library.load
    if load < library.slots:
        return True
    return not library.is_stuck and load < manager.policies.dispatch.window(manager.state, library)


def update_load_index(manager: Manager, library: Library) -> bool:
    """Update the place of a library in the load index. Return True if the library can take more calls."""
    index, held = library.context.index, len(library.held)
    if (
        not library.is_serving
        or library.pilot.reserved_for is not None
        or (held == 1 and library.call_that_runs_alone is not None)
    ):
        index.remove_library(library)
        index.end_burst(library)
        return False
    load = held + len(library.withdrawn_calls)
    if load < library.slots:
        library.is_stuck = False
        index.set_level(library, FREE)
        return True
    room = not library.is_stuck and load < manager.policies.dispatch.window(manager.state, library)
    waiting = load - library.slots
    if waiting == FULL and not room:
        index.set_level(library, CLOSED)
        return False
    index.set_level(library, waiting)
    if STUCK_TIMER not in manager.state.timers:
        manager.set_timer(STUCK_TIMER, manager.state.now + STUCK_AFTER_S)
    return room


def contexts_serving_group(group: CallGroup) -> Iterator[Context]:
    yield group.context
    for key in group.options.variants:
        other = group.context.variants.get(key)
        if other is not None:
            yield other


def libraries_serving_context(context: Context) -> Iterator[Library]:
    """Yield the libraries that can run the calls of a context. The context's own libraries come first."""
    yield from context.libraries.values()
    for other in context.variants.values():
        yield from other.libraries.values()


def remove_call_from_queue(manager: Manager, call: Call) -> None:
    context = call.group.context
    context.queue.remove(call)
    record_queue_shrinkage(manager, context)


def put_call_back_in_queue(manager: Manager, call: Call) -> None:
    context = call.group.context
    setbacks = manager.state.setbacks.get(call.id)
    if setbacks is None or not blame.must_be_set_aside(manager, call, setbacks):
        context.queue.put_back(call)
    else:
        context.queue.set_aside(call)
        manager.set_aside_calls_due = True
    record_queue_growth(manager, context)


def record_queue_growth(manager: Manager, context: Context) -> None:
    """Record that calls wait. If the number of waiting calls has doubled, the policies decide again."""
    if context.recipe.key not in manager.state.waiting_contexts:
        manager.state.waiting_contexts[context.recipe.key] = context
        manager.demand_changed = True
        update_starved_since(manager, context)
    if context.queue.count >= context.residency_due_at_count:
        context.residency_due_at_count = 2 * context.queue.count
        manager.contexts_to_decide[context] = None
        manager.demand_changed = True


def record_queue_shrinkage(manager: Manager, context: Context) -> None:
    count = context.queue.count
    if not count:
        context.residency_due_at_count = 1
        context.starved_since = None
        manager.state.waiting_contexts.pop(context.recipe.key, None)
    elif 4 * count < context.residency_due_at_count:
        context.residency_due_at_count = 2 * count


def update_starved_since(manager: Manager, changed: Context) -> None:
    for context in (changed, *changed.variant_of.values()):
        if not context.queue.count or any(library.is_usable for library in libraries_serving_context(context)):
            context.starved_since = None
        elif context.starved_since is None:
            context.starved_since = manager.state.now
