"""Libraries whose claims on memory are met start or grow; those whose claims cannot be met are refused."""

from __future__ import annotations

from stoker.pilot.core import resizing, starting, station
from stoker.pilot.core.stages import Stage
from stoker.pilot.core.state import CoreState, PilotLibrary


def memory_freed(state: CoreState) -> None:
    """Devices have more room than before: libraries that wait for it go on."""
    for library, memory_bytes in station.met(state):
        if library.stage is Stage.WAITING:
            starting.admitted(state, library)
        else:
            resizing.tell(state, library, memory_bytes)


def waited(state: CoreState, library: PilotLibrary) -> None:
    """A library has waited for room for a while: go on as long as something there is about to end or to shrink."""
    wanted = state.claims.get(library.number)
    if wanted is None:
        return
    why = station.why_hopeless(state, library)
    if not why:
        station.wait_on(state, library)
        return
    why += ", and nothing there is about to end or to shrink"
    if library.stage is Stage.WAITING:
        starting.refuse(state, library, why)
    else:
        resizing.refuse(state, library, why, ordered_bytes=wanted)
