"""Which library holds which call."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core import indexing, queues, reservations, stuck
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Gang, Library
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.protocol.ids import CallId

# What a member of a gang that is taken apart has to end by itself, before its library is ended for it.
GANG_GRACE_S = 10.0


def give(manager: Manager, library: Library, call: Call) -> None:
    """A call that is in no queue goes to a library when the event is over."""
    call.state = CallState.HELD
    call.holder = library
    call.sent_at = manager.state.now
    hold(manager, library, [call])
    indexing.fills(library, 1, manager.state.now)
    indexing.reclass(manager, library)


def hold(manager: Manager, library: Library, calls: list[Call]) -> None:
    """A library holds these calls from now on. They are sent when the event is over; the caller lists it anew."""
    held = library.held
    for call in calls:
        held[call.id] = call
        if call.by_itself:
            library.suspect = call
    batch = manager.sends.get(library)
    if batch is None:
        manager.sends[library] = calls
    else:
        batch += calls


def drop(manager: Manager, library: Library, call: CallId, *, running: bool, grace_s: float) -> None:
    """A library is told to drop a call when the event is over."""
    manager.drops.setdefault((library, running, grace_s), []).append(call)


def let_go(manager: Manager, call: Call) -> None:
    """A held call is held by nobody any more. A gang's other members are told; one library knows already."""
    if type(call.holder) is Gang:
        withdraw(manager, call, running=True)
    call.holder = None
    if manager.state.trials:
        reservations.let_go(manager, call)


def requeue(manager: Manager, calls: Iterable[Call], *, why: str) -> None:
    """Held calls go back to where their arrival puts them in their queues, and to free libraries after the event."""
    for call in calls:
        let_go(manager, call)
        call.offered = False
        call.state = CallState.WAITING
        call.note(manager.state.now, why)
        context = call.group.context
        queues.put_back(manager, call)
        queues.hungry(manager, context)
        manager.returned[context] = None
        manager.dirty[context] = None
        manager.changed("calls", call.id)


def withdraw(manager: Manager, call: Call, *, running: bool) -> None:
    """Take a held call away from whoever holds it; its slot stays taken until the pilot says that it is free."""
    holder = call.holder
    members = holder.members if isinstance(holder, Gang) else (holder,)
    grace_s = GANG_GRACE_S if isinstance(holder, Gang) else 0.0
    for library in members:
        if library is not None and library.held.pop(call.id, None) is not None:
            batch = manager.sends.get(library)
            if batch is not None and call in batch:
                batch.remove(call)
            else:
                library.zombies[call.id] = running
                library.ended_at = manager.state.now
                drop(manager, library, call.id, running=running, grace_s=grace_s)
            indexing.reclass(manager, library)
    call.holder = None


def takes(manager: Manager, library: Library, call: Call) -> bool:
    """Whether a library may be given one more call of this kind just now."""
    group = call.group
    return (
        library.state is LibraryState.READY
        and library.pilot.state is PilotState.HERE
        and (library.context is group.context or library.context.recipe.key in group.options.variants)
        and library.load < stuck.room(manager, library)
        and library.admits(call)
    )


def serve_after(manager: Manager, context: Context) -> None:
    """Serve a context's queue at the end of the event, where a gang that libraries were kept for may be none any more:
    it left, or too few libraries are left for it."""
    if context.queue.count and (context.idle or context.roomy):
        manager.returned[context] = None


def unsend(manager: Manager, library: Library, *, why: str) -> None:
    """What a library was given in this very event, and was not sent yet, goes back."""
    unsent = manager.sends.pop(library, None)
    if unsent:
        for call in unsent:
            del library.held[call.id]
        requeue(manager, unsent, why=why)


def may_go_on(library: Library, call: Call) -> bool:
    """Whether a call that runs in a library already may count as held there."""
    suspect = library.suspect is not None or (call.by_itself and library.slots > 1)
    return call.group.context is library.context and call.group.options.gang[1] == 1 and not suspect


def holds_already(manager: Manager, library: Library, call: Call, *, why: str) -> None:
    """A call that is in no queue runs in this library already: the library holds it from now on."""
    call.state = CallState.HELD
    call.holder = library
    call.sent_at = manager.state.now
    call.note(manager.state.now, f"lib-{library.id} on {library.pilot.id}: {why}")
    library.held[call.id] = call
    indexing.reclass(manager, library)
