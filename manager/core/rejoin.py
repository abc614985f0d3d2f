"""A pilot that was given up comes back: what it still holds is worth keeping.

A broken connection is taken for a lost pilot after a second, because calls should not wait for a node that is dead.
Often it was the network. The pilot has kept its contexts hot and its calls running meanwhile, so it is taken back as it
is: its libraries are the manager's again; a call of its that still waits in the queue goes on there as if nothing had
happened; one that runs elsewhere by now may finish here as well, and whichever ends first ends the call. What its
frames say that were not acknowledged is still to come, and counts.

A pilot that left by itself, or was told to go, does not come back (`kept` is None).
"""

from __future__ import annotations

from stoker.manager.core import block_orders, libraries, losses, pilot_states
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.protocol.to_manager import PilotHello


def rejoin(manager: Manager, pilot: Pilot, message: PilotHello) -> Pilot:
    """Take back a pilot that was given up, with the libraries that it still has."""
    state, kept = manager.state, pilot.kept or {}
    pilot_states.back(manager, pilot)
    losses.back(manager, pilot)
    block_orders.pilot_back(manager, pilot)
    pilot_states.keeps_nothing(pilot)
    pilot.note(state.now, "came back after it had been given up")
    libraries.devices_back(manager, pilot)
    for facts in message.libraries:
        before = kept.get(facts.library)
        if before is not None:
            libraries.back(manager, *before)
    return pilot
