"""A pilot came back: what the manager thinks is there, against what is there.

The hello of a pilot that reconnects says what it held before the frames that were not acknowledged; those follow, and
end what they end. So whatever it does not list, it never got or has lost; and whatever it was told while it was cut
off, it must be told again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.manager.core import calls, feeding, gangs, libraries
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.state import Library, Pilot
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_manager import LibraryFacts, PilotHello
from stoker.manager.protocol.to_pilot import CancelCalls, Exit, ResizeLibrary, StopLibrary

if TYPE_CHECKING:
    from stoker.manager.core.core import Core


def reconcile(core: Core, pilot: Pilot, message: PilotHello) -> None:
    """Make the manager's picture of a pilot true, and the pilot do what it was told meanwhile."""
    there = {facts.library: facts for facts in message.libraries}
    for library in list(pilot.libraries.values()):
        if library.id not in there:
            libraries.lost(core, library, reason="it came back without the library")
    for library in list(pilot.libraries.values()):
        _library(core, library, there.pop(library.id))
    for id in there:
        core.say(pilot, StopLibrary(id, "the manager does not know it"))
    if pilot.state is PilotState.DRAINING:
        core.say(pilot, Exit("it was told to drain", drain=True))


def _library(core: Core, library: Library, facts: LibraryFacts) -> None:
    listed = set(facts.calls)
    missing = [call for id, call in library.held.items() if id not in listed]
    for call in missing:
        del library.held[call.id]
    calls.requeue(core, missing, why=f"never reached lib-{library.id}: back in the queue")
    unknown = [id for id in facts.calls if id not in library.held and id not in library.zombies]
    library.zombies = {id: running for id, running in library.zombies.items() if id in listed}
    library.zombies.update(dict.fromkeys(unknown, False))
    library.functions.clear()
    library.taking = 0
    for running in (False, True):
        again = tuple(CallId(id) for id, flag in library.zombies.items() if flag is running)
        if again:
            core.say(library.pilot, CancelCalls(library.id, again, running))
    gangs.remind(core, library)
    if library.resizing:
        core.say(library.pilot, ResizeLibrary(library.id, library.resizing[-1]))
        del library.resizing[:-1]
    feeding.reclass(core, library)
    if library.state is LibraryState.STOPPING:
        core.say(library.pilot, StopLibrary(library.id, "it was told to stop"))
    elif library.state is LibraryState.LOADING and facts.ready:
        libraries.hot(core, library)
    else:
        feeding.pull(core, library)
