"""Libraries with room get calls from their context's queue.

The hot path. What is done here a call is done a million times, so the calls that a library pulls are handled together.

A call that may have killed its library (`kills`) runs by itself until it is known to be good or bad: a library that
holds such a suspect is given nothing else. One that may have killed its pilot has a whole pilot to itself (`suspects`).
"""

from __future__ import annotations

from itertools import islice

from stoker.manager.core import actions, deadlines, holding, indexing, libraries, queues, suspects
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.phases import LibraryState, PilotState

ASK_PAUSE_S = 0.05
"""A library that falls idle is news for contexts without any; they are not asked about more often than this."""

SATED = 4
"""When so many of the least loaded libraries take nothing of a backlog, no other is asked."""

_LOOKED_AT = 16


def pull(manager: Manager, library: Library) -> None:
    """A library has room: give it calls from its context's queue, else see whether others hold too many."""
    state, context = manager.state, library.context
    dispatch, queue = manager.policies.dispatch, library.context.queue
    if library.state is not LibraryState.READY or library.pilot.state is not PilotState.HERE:
        return
    indexing.relist(manager, library)
    if queue.timed:
        deadlines.settle(manager, context)
    if queue.apart and library.id in context.index.free:
        suspects.offer(manager, library)
    has_room = library.suspect is None and library.pilot.reserved is None
    while has_room and queue.count:
        answer = dispatch.pull(state, library)
        if not isinstance(answer, int):
            actions.carry_out(manager, answer, seam="dispatch")
            break
        head = queue.single()
        if library.stuck:
            answer = min(answer, library.slots - library.load)
        if answer <= 0 or head is None or not _give(manager, library, head, answer):
            break
        has_room = indexing.relist(manager, library)
    queues.fed(manager, context)
    if library.held or library.zombies or queue.single() is not None:
        return
    libraries.is_idle(manager, library)
    actions.carry_out(manager, dispatch.dry(state, library), seam="dispatch")
    for hungry in state.hungry.values():
        if hungry.starved_since is not None and state.now - hungry.asked_at >= ASK_PAUSE_S:
            manager.dirty[hungry] = None


def _give(manager: Manager, library: Library, head: Call, count: int) -> bool:
    """Give a library up to `count` calls of the group that is next in the queue. False if it may have none of them."""
    group = head.group
    if head.by_itself:
        if library.load:
            return False
        count = 1
    taken = queues.take(library.context, group, count)
    barred = [call for call in taken if call.by_itself and call is not head]
    if library.zombies:
        barred += [call for call in taken if call.id in library.zombies and call not in barred]
    for call in barred:
        taken.remove(call)
        queues.put_in_place(call)
    if taken:
        holding.give_all(manager, library, taken)
    return bool(taken)


def serve(manager: Manager, context: Context) -> None:
    """Calls came to the queue: give them to libraries that have room, the one that was given some just now first, then
    the hottest that are free. Those that work already take their share of a backlog, the least loaded first; when some
    in a row have had it, so have the others."""
    queue, index, burst = context.queue, context.index, context.index.burst
    if burst is not None and burst.at == manager.state.now:
        pull(manager, burst.library)
    for some in (_LOOKED_AT, len(index.free)):  # nearly always the first few take it all
        for library in tuple(islice(index.hottest(), some)) if queue.count else ():
            if not queue.count:
                return
            pull(manager, library)
            if queue.single() is None:  # gangs may still wait: what the first library did for them, others would too
                return
    while queue.count:
        before = queue.count
        for library in tuple(islice(index.least_loaded(), SATED)):  # those that take some stand elsewhere then
            if indexing.has_room(manager, library):
                pull(manager, library)
        if queue.count == before:
            return
