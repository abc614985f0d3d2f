"""A pilot came back: what the manager thinks is there, against what is there.

The hello of a pilot that reconnects says what it held before the frames that were not acknowledged; those follow, and
end what they end. So whatever it does not list, it never got or has lost; and whatever it was told while it was cut
off, it must be told again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.manager.core import calls, feeding, gangs, libraries, repair
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.core.state import Call, Library, Pilot
from stoker.manager.protocol.ids import CallId, LibraryId
from stoker.manager.protocol.to_manager import LibraryFacts, PilotHello
from stoker.manager.protocol.to_pilot import CancelCalls, Exit, ResizeLibrary, StopLibrary

if TYPE_CHECKING:
    from stoker.manager.core.core import Core


def reconcile(core: Core, pilot: Pilot, message: PilotHello) -> None:
    """Make the manager's picture of a pilot true, and the pilot do what it was told meanwhile."""
    there = {facts.library: facts for facts in message.libraries}
    for library in list(pilot.libraries.values()):
        if library.id not in there or there[library.id].recipe != library.context.recipe.key:
            libraries.lost(core, library, reason="it came back without the library")
    for id, facts in there.items():
        if id not in pilot.libraries and repair.adopt(core, pilot, facts, message) is None:
            core.say(pilot, StopLibrary(id, "the manager does not know it"))
    libraries_here = list(pilot.libraries.values())
    _requeue_missing(core, libraries_here, there)
    for library in libraries_here:
        _library(core, library, there[library.id])
    for library in libraries_here:  # not before the picture of all is true: a gang may begin on several of them
        if pilot.libraries.get(library.id) is library:
            _go_on(core, library, there[library.id])
    if pilot.state is PilotState.DRAINING:
        core.say(pilot, Exit("it was told to drain", drain=True))


def _unknown(core: Core, library: Library, id: CallId) -> None:
    """A call is in a library that does not hold it, as far as the manager knows. One that waits goes on there: its
    pilot had been given up, or the journal has lost where it was sent. One that was never submitted is an orphan."""
    call = core.state.calls.get(id)
    if call is None:
        if repair.is_unheard_of(core.state, id):
            repair.take_orphan(core, library, id)
        else:
            _drop(core, library, id, is_gang=False)
    elif call.state is CallState.WAITING and repair.may_go_on(library, call):
        call.group.context.queue.leave(call)
        calls.fed(core, call.group.context)
        repair.hold(core, library, call, why="it has run there all the time: it goes on")
    else:  # it runs elsewhere by now; of a gang, the whole begins again
        _drop(core, library, id, is_gang=call.group.options.gang[1] > 1)


def _drop(core: Core, library: Library, id: CallId, *, is_gang: bool) -> None:
    library.zombies[id] = is_gang
    core.drop(library, id, running=is_gang, grace_s=calls.GANG_GRACE_S if is_gang else 0.0)


def _requeue_missing(core: Core, here: list[Library], there: dict[LibraryId, LibraryFacts]) -> None:
    """Calls that never reached their libraries go back to their queues. Of a gang several members may lack it: they are
    all known before it is taken apart, or one of them would be told to drop what it has not, after it begins again."""
    missing: dict[Call, Library] = {}
    for library in here:
        listed = set(there[library.id].calls)
        for call in [call for id, call in library.held.items() if id not in listed]:
            del library.held[call.id]
            missing.setdefault(call, library)
    for call, library in missing.items():
        calls.requeue(core, (call,), why=f"never reached lib-{library.id}: back in the queue")


def _library(core: Core, library: Library, facts: LibraryFacts) -> None:
    """Make the manager's picture of one library true. It is given nothing yet."""
    listed = set(facts.calls)
    unknown = [id for id in facts.calls if id not in library.held and id not in library.zombies]
    library.zombies = {id: running for id, running in library.zombies.items() if id in listed}
    library.functions.clear()
    library.taking = 0
    for running in (False, True):
        orphans = core.state.orphans
        again = tuple(CallId(id) for id, flag in library.zombies.items() if flag is running and id not in orphans)
        if again:
            core.say(library.pilot, CancelCalls(library.id, again, running))
    for id in unknown:
        _unknown(core, library, id)
    gangs.remind(core, library)
    if library.resizing:
        core.say(library.pilot, ResizeLibrary(library.id, library.resizing[-1]))
        del library.resizing[:-1]
    feeding.reclass(core, library)


def _go_on(core: Core, library: Library, facts: LibraryFacts) -> None:
    """Tell a library to end, if it was told so before; else have it serve its queue."""
    if library.state is LibraryState.STOPPING:
        core.say(library.pilot, StopLibrary(library.id, "it was told to stop"))
    elif library.state is LibraryState.LOADING and facts.ready:
        libraries.hot(core, library)
    else:
        feeding.pull(core, library)
