"""A pilot came back: what the manager thinks is there, against what is there.

The hello of a pilot that reconnects says what it held before the frames that were not acknowledged; those follow, and
end what they end. So whatever it does not list, it never got or has lost; and whatever it was told while it was cut
off, it must be told again.
"""

from __future__ import annotations

from stoker.manager.core import feeding, gangs, holding, indexing, libraries, library_messages, queues, repair
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Library, Pilot
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.protocol.ids import CallId, LibraryId
from stoker.manager.protocol.to_manager import LibraryFacts, PilotHello
from stoker.manager.protocol.to_pilot import CancelCalls, Exit, ResizeLibrary, StopLibrary


def reconcile(manager: Manager, pilot: Pilot, message: PilotHello) -> None:
    """Make the manager's picture of a pilot true, and the pilot do what it was told meanwhile."""
    there = {facts.library: facts for facts in message.libraries}
    for library in list(pilot.libraries.values()):
        if library.id not in there or there[library.id].recipe != library.context.recipe.key:
            libraries.lost(manager, library, reason="it came back without the library")
    for id, facts in there.items():
        if id not in pilot.libraries and repair.adopt(manager, pilot, facts, message) is None:
            manager.say(pilot, StopLibrary(id, "the manager does not know it"))
    libraries_here = list(pilot.libraries.values())
    _requeue_missing(manager, libraries_here, there)
    for library in libraries_here:
        _library(manager, library, there[library.id])
    for library in libraries_here:  # not before the picture of all is true: a gang may begin on several of them
        if pilot.libraries.get(library.id) is library:
            _go_on(manager, library, there[library.id])
    if pilot.state is PilotState.DRAINING:
        manager.say(pilot, Exit("it was told to drain", drain=True))


def _unknown(manager: Manager, library: Library, id: CallId) -> None:
    """A call is in a library that does not hold it, as far as the manager knows. One that waits goes on there: its
    pilot had been given up, or the journal has lost where it was sent. One that was never submitted is an orphan."""
    call = manager.state.calls.get(id)
    if call is None:
        if repair.is_unheard_of(manager.state, id):
            repair.take_orphan(manager, library, id)
        else:
            _drop(manager, library, id, is_gang=False)
    elif call.state is CallState.WAITING and holding.may_go_on(library, call):
        call.group.context.queue.leave(call)
        queues.fed(manager, call.group.context)
        holding.holds_already(manager, library, call, why="it has run there all the time: it goes on")
    else:  # it runs elsewhere by now; of a gang, the whole begins again
        _drop(manager, library, id, is_gang=call.group.options.gang[1] > 1)


def _drop(manager: Manager, library: Library, id: CallId, *, is_gang: bool) -> None:
    library.zombies[id] = is_gang
    holding.drop(manager, library, id, running=is_gang, grace_s=holding.GANG_GRACE_S if is_gang else 0.0)


def _requeue_missing(manager: Manager, here: list[Library], there: dict[LibraryId, LibraryFacts]) -> None:
    """Calls that never reached their libraries go back to their queues. Of a gang several members may lack it: they are
    all known before it is taken apart, or one of them would be told to drop what it has not, after it begins again."""
    missing: dict[Call, Library] = {}
    for library in here:
        listed = set(there[library.id].calls)
        for call in [call for id, call in library.held.items() if id not in listed]:
            del library.held[call.id]
            missing.setdefault(call, library)
    for call, library in missing.items():
        holding.requeue(manager, (call,), why=f"never reached lib-{library.id}: back in the queue")


def _library(manager: Manager, library: Library, facts: LibraryFacts) -> None:
    """Make the manager's picture of one library true. It is given nothing yet."""
    listed = set(facts.calls)
    unknown = [id for id in facts.calls if id not in library.held and id not in library.zombies]
    library.zombies = {id: running for id, running in library.zombies.items() if id in listed}
    library.functions.clear()
    library.taking = 0
    for running in (False, True):
        orphans = manager.state.orphans
        again = tuple(CallId(id) for id, flag in library.zombies.items() if flag is running and id not in orphans)
        if again:
            manager.say(library.pilot, CancelCalls(library.id, again, running))
    for id in unknown:
        _unknown(manager, library, id)
    gangs.remind(manager, library)
    if library.resizing:
        manager.say(library.pilot, ResizeLibrary(library.id, library.resizing[-1]))
        del library.resizing[:-1]
    indexing.reclass(manager, library)


def _go_on(manager: Manager, library: Library, facts: LibraryFacts) -> None:
    """Tell a library to end, if it was told so before; else have it serve its queue."""
    if library.state is LibraryState.STOPPING:
        manager.say(library.pilot, StopLibrary(library.id, "it was told to stop"))
    elif library.state is LibraryState.LOADING and facts.ready:
        library_messages.hot(manager, library)
    else:
        feeding.pull(manager, library)
