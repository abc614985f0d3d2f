"""A pilot came back: what the manager thinks is there, against what is there.

The hello of a pilot that reconnects says what it held before the frames that were not acknowledged; those follow, and
end what they end. So whatever it does not list, it never got or has lost; and whatever it was told while it was cut
off, it must be told again.
"""

from __future__ import annotations

from stoker.manager.core import feeding, gangs, holding, indexing, libraries, library_messages, queues, repair, sending
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Library, Pilot
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.protocol.ids import CallId, LibraryId
from stoker.protocol.to_manager import LibraryFacts, PilotHello
from stoker.protocol.to_pilot import CancelCalls, Exit, StopLibrary


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
            holding.drop(manager, library, id, running=False)
    elif call.state is CallState.WAITING and holding.may_go_on(library, call):
        queues.leave(manager, call)
        holding.resume(manager, library, call, why="it has run there all the time: it goes on")
    else:  # it runs elsewhere by now; of a gang, the whole begins again
        is_gang = call.group.options.gang[1] > 1
        holding.drop(manager, library, id, running=is_gang, of_gang=is_gang)


def _requeue_missing(manager: Manager, here: list[Library], there: dict[LibraryId, LibraryFacts]) -> None:
    """Calls that never reached their libraries go back to their queues. Of a gang several members may lack it: they are
    all known before it is taken apart, or one of them would be told to drop what it has not, after it begins again."""
    missing: dict[Call, Library] = {}
    for library in here:
        for call in holding.now_holds(library, set(there[library.id].calls)):
            missing.setdefault(call, library)
    for call, library in missing.items():
        holding.requeue(manager, (call,), why=f"never reached lib-{library.id}: back in the queue")


def _library(manager: Manager, library: Library, facts: LibraryFacts) -> None:
    """Make the manager's picture of one library true. It is given nothing yet."""
    listed = set(facts.calls)
    unknown = [id for id in facts.calls if id not in library.held and id not in library.zombies]
    holding.now_occupies(library, listed)
    sending.lost_functions(library)
    libraries.said_slots(library, facts.slots)
    for running in (False, True):
        orphans = manager.state.orphans
        again = tuple(CallId(id) for id, flag in library.zombies.items() if flag is running and id not in orphans)
        if again:
            manager.say(library.pilot, CancelCalls(library.id, again, running))
    for id in unknown:
        _unknown(manager, library, id)
    gangs.remind(manager, library)
    libraries.resize_again(manager, library)
    indexing.relist(manager, library)


def _go_on(manager: Manager, library: Library, facts: LibraryFacts) -> None:
    """Tell a library to end, if it was told so before; else have it serve its queue."""
    if library.state is LibraryState.STOPPING:
        manager.say(library.pilot, StopLibrary(library.id, "it was told to stop"))
    elif library.state is LibraryState.LOADING and facts.ready:
        library_messages.hot(manager, library)
    else:
        feeding.pull(manager, library)
