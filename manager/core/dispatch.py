"""Libraries with room get calls from their context's queue.

The hot path. What is done here a call is done a million times, so the calls that a library pulls are handled together.

A call that may have killed its library (`kills`) runs by itself until it is known to be good or bad: a library that
holds such a suspect is given nothing else. One that may have killed its pilot has a whole pilot to itself (`suspects`).

Calls that arrive, or that a library refused: each goes to a library with room, or waits.
"""

from __future__ import annotations

from msgspec import Struct

from stoker.contexts.recipe import NO_LIMITS
from stoker.manager.core import actions, deadlines, holding, libraries, pilots, queues, retries
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Group, Library, LibraryState, PilotState
from stoker.manager.core.seams import PolicyError
from stoker.protocol.calls import CallSpec

# ---- feeding


ASK_PAUSE_S = 0.05
"""Contexts without a library are asked about when a library falls idle, no more often than this."""


def feed_library(manager: Manager, library: Library) -> None:
    """A library has room: give it calls from its context's queue, else see whether others hold too many."""
    state, context = manager.state, library.context
    dispatch, queue = manager.policies.dispatch, library.context.queue
    if library.state is not LibraryState.READY or library.pilot.state is not PilotState.HERE:
        return
    # A library that is filled up again is listed once, afterwards. Until then the index shows it as it was, so a policy
    # that gives it nothing is asked again with the library listed.
    apart = queue.apart or (context.listed_by and any(other.queue.apart for other in context.listed_by.values()))
    listed = library.stuck or not queue.count or queue.gangs or apart
    if listed:
        queues.relist_library(manager, library)
    if queue.timed:
        deadlines.drop_late_calls(manager, context)
    if apart and library.id in context.index.free:
        retries.offer_apart(manager, library)
    has_room = library.suspect is None and library.pilot.reserved is None
    while has_room and queue.count:
        answer = dispatch.pull(state, library)
        if not listed and not (isinstance(answer, int) and answer > 0):
            queues.relist_library(manager, library)
            listed, answer = True, dispatch.pull(state, library)
        if not isinstance(answer, int):
            actions.carry_out(manager, answer, seam="dispatch")
            break
        head = queue.single()
        if library.stuck:
            answer = min(answer, library.slots - library.load)
        if answer <= 0 or head is None or not _give(manager, library, head, answer):
            break
        listed, has_room = True, queues.relist_library(manager, library)
    if not listed:
        queues.relist_library(manager, library)
    queues.note_fed(manager, context)
    if context.listed_by:
        _take_from_others(manager, library)
    if library.held or library.zombies or queue.single() is not None:
        return
    libraries.note_idle(manager, library)
    actions.carry_out(manager, dispatch.dry(state, library), seam="dispatch")
    if context.limits != NO_LIMITS:
        actions.carry_out(manager, manager.policies.residency.idle(state, library), seam="residency")
    for hungry in state.hungry.values():
        if hungry.starved_since is not None and state.now - hungry.asked_at >= ASK_PAUSE_S:
            manager.dirty[hungry] = None


def _take_from_others(manager: Manager, library: Library) -> None:
    """Calls of other contexts that list this library's wait: its policy says which of them it takes."""
    waiting = any(other.queue.count for other in library.context.listed_by.values())
    if waiting and library.pilot.reserved is None and queues.has_room(manager, library):
        dispatch = manager.policies.dispatch
        actions.carry_out(manager, dispatch.pull_others(manager.state, library), seam="dispatch")


def _give(manager: Manager, library: Library, head: Call, count: int) -> bool:
    """Give a library up to `count` calls of the group that is next in the queue. False if it may have none of them."""
    group = head.group
    if head.by_itself:
        if library.load:
            return False
        count = 1
    taken = queues.dequeue(library.context, group, count)
    barred = [call for call in taken if call.by_itself and call is not head]
    if library.zombies:
        barred += [call for call in taken if call.id in library.zombies and call not in barred]
    for call in barred:
        taken.remove(call)
        queues.enqueue_in_place(call)
    if taken:
        holding.give_all(manager, library, taken)
    return bool(taken)


def apply_limits(manager: Manager, context: Context) -> None:
    """Other limits hold for a context: its idle libraries may have to go, and its waiting calls may have others."""
    residency, state = manager.policies.residency, manager.state
    if context.limits != NO_LIMITS:
        for library in list(context.libraries.values()):
            if library.usable and library.state is LibraryState.READY and not library.load:
                actions.carry_out(manager, residency.idle(state, library), seam="residency")
    if context.queue.count:
        manager.dirty[context] = None


def serve_queue(manager: Manager, context: Context) -> None:
    """Calls came to the queue: offer it to the context's libraries with room, in the order of the policy, then to those
    of contexts that the calls list."""
    queue, dispatch = context.queue, manager.policies.dispatch
    for library in dispatch.serve_order(manager.state, context):
        if not queue.count:
            return
        if queues.has_room(manager, library):
            feed_library(manager, library)
    for other in context.lists.values():
        for library in dispatch.serve_order(manager.state, other):
            if not queue.count:
                return
            if library.state is LibraryState.READY and library.pilot.state is PilotState.HERE:
                _take_from_others(manager, library)


# ---- placing


def submit_calls(manager: Manager, group: Group, specs: list[CallSpec]) -> None:
    """Accept calls of one group: each goes to a library with room, or waits."""
    fresh = holding.accept(manager, group, specs)
    if not fresh:
        return
    group.open_calls += len(fresh)
    group.client.open_calls += len(fresh)
    group.client.last_call = max(group.client.last_call, fresh[-1].id)
    if manager.tracked:
        for changes in manager.tracked:
            changes.calls.update(call.id for call in fresh)
    context = group.context
    if manager.state.orphans:
        fresh = pilots.claim_orphans(manager, fresh)
        if not fresh:
            return
    if group.options.objective.deadline_at and manager.policies.dispatch.by_deadline:
        fresh = deadlines.admit_by_deadline(manager, fresh)
        if not fresh:
            return
    _enter(manager, context, fresh)
    if context.queue.timed:
        deadlines.watch_queue(manager, context)


def _enter(manager: Manager, context: Context, fresh: list[Call]) -> None:
    """New calls of one group go to libraries with room, or wait."""
    dispatch = manager.policies.dispatch
    few = len(fresh) <= dispatch.places_one_by_one_up_to and not context.queue.count
    if few or dispatch.asks_every_call:
        for call in fresh:
            place_call(manager, call)
        return
    queues.enqueue(context, fresh)
    if context.index:
        serve_queue(manager, context)
    if context.queue.count:
        queues.note_hungry(manager, context)


def place_call(manager: Manager, call: Call, *, again: bool = False) -> None:
    """Ask where a waiting call that is in no queue should go. `again`: it was sent somewhere before."""
    context = call.group.context
    answer = manager.policies.dispatch.place(manager.state, call)
    if isinstance(answer, int):
        library = manager.state.libraries.get(answer)
        if library is not None and holding.takes(manager, library, call) and call.group.options.gang[0] <= 1:
            holding.give(manager, library, call)
            return
        manager.illegal(PolicyError(f"call {call.id} cannot be placed in library {answer}"), seam="dispatch")
        answer = None
    if again:
        queues.enqueue_in_place(call)
    else:
        queues.enqueue(context, [call])
    if answer is not None:
        actions.carry_out(manager, (answer,) if isinstance(answer, Struct) else answer, seam="dispatch")
    if context.queue.count:
        queues.note_hungry(manager, context)


def retry_call(manager: Manager, call: Call, *, why: str) -> None:
    """A held call that its library refused, or was made to give up, is placed anew."""
    holding.wait_again(manager, call, why=why)
    if call.id in manager.state.trials:
        queues.wait_again_apart(manager, call)
        manager.returned[call.group.context] = None
    else:
        place_call(manager, call, again=True)
