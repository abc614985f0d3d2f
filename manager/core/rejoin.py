"""A pilot that was given up comes back: what it still holds is worth keeping.

A broken connection is taken for a lost pilot after a second, because calls should not wait for a node that is dead.
Often it was the network. The pilot has kept its contexts hot and its calls running meanwhile, so it is taken back as it
is: its libraries are the manager's again; a call of its that still waits in the queue goes on there as if nothing had
happened; one that runs elsewhere by now may finish here as well, and whichever ends first ends the call. What its
frames say that were not acknowledged is still to come, and counts.

A pilot that left by itself, or was told to go, does not come back (`kept` is None).
"""

from __future__ import annotations

from stoker.manager.core import block_orders, indexing, libraries, losses, queues
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Library, Pilot
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.protocol.ids import PilotId
from stoker.manager.protocol.to_manager import PilotHello


def rejoin(manager: Manager, pilot: Pilot, message: PilotHello) -> Pilot:
    """Take back a pilot that was given up, with the libraries that it still has."""
    state, kept = manager.state, pilot.kept or {}
    del state.gone_pilots[PilotId(pilot.id)]
    state.pilots[pilot.id] = pilot
    state.pilots_gone -= 1
    pilot.state = PilotState.DRAINING if pilot.was is PilotState.DRAINING else PilotState.HERE
    losses.back(manager, pilot)
    block_orders.pilot_back(manager, pilot)
    pilot.kept = None
    pilot.notes.append((state.now, "came back after it had been given up"))
    for device in pilot.devices.values():
        device.tier_since = state.now
    for facts in message.libraries:
        before = kept.get(facts.library)
        if before is not None:
            _adopt(manager, *before)
    return pilot


def _adopt(manager: Manager, library: Library, promised_bytes: int, was: LibraryState) -> None:
    """A library is the manager's again, as it was: hot, loading, or told to stop."""
    state, context = manager.state, library.context
    library.state = LibraryState.STOPPING if was is LibraryState.STOPPING else LibraryState.LOADING
    if was is LibraryState.READY:
        library.state = LibraryState.READY
    state.libraries[library.id] = library
    state.gone_libraries.pop(library.id, None)
    context.libraries[library.id] = library
    library.pilot.libraries[library.id] = library
    for device in library.devices:
        device.libraries[library.id] = library
    libraries.promise(library, promised_bytes)
    for device in library.devices:
        libraries.tier(manager, device)
    library.notes.append((state.now, "back, as it was"))
    indexing.relist(manager, library)
    queues.starving(manager, context)
