"""Libraries whose claims on memory are met start or grow; those whose claims cannot be met are refused."""

from __future__ import annotations

from stoker.pilot.core import resizing, starting, station
from stoker.pilot.core.state import PilotLibrary, PilotState


def memory_freed(state: PilotState) -> None:
    """Devices have more room than before: libraries that wait for it go on."""
    for library, memory_bytes in station.met(state):
        if library.serves:
            resizing.tell(state, library, memory_bytes)
        else:
            starting.admitted(state, library)


def waited(state: PilotState, library: PilotLibrary) -> None:
    """A library has waited for room for a while: go on as long as something there is about to end or to shrink."""
    why = station.why_hopeless(state, library)
    if not why:
        station.wait_on(state, library)
    elif library.serves:
        resizing.refuse(
            state,
            library,
            f"{why}, and nothing there is about to end or to shrink",
            ordered_bytes=state.claims[library.number],
        )
    else:
        starting.refuse(state, library, f"{why}, and nothing there is about to end or to shrink")
