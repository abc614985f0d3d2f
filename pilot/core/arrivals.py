"""What has become of objects that were wanted."""

from __future__ import annotations

from stoker.pilot.core import starting, wants
from stoker.pilot.core.commands import Pin
from stoker.pilot.core.events import Lack, ObjectArrived
from stoker.pilot.core.state import PilotState


def arrived(state: PilotState, event: ObjectArrived) -> None:
    """An object is in the cache: keep it for the libraries that wait for it."""
    found = wants.arrived(state, event)
    state.log(
        f"{event.name} is here: {event.origin_bytes} bytes from where it comes from, {event.peer_bytes} from peers, "
        f"{event.seconds:.2f} s"
    )
    for number in tuple(found.libraries) if found is not None else ():
        if found is not None and number in state.libraries:
            state.out.append(Pin(number, (found.ref,)))


def lost(state: PilotState, name: str, lack: Lack) -> None:
    """An object will not come: libraries that wait for it fail, or go on without it."""
    found = wants.give_up(state, name)
    for number in tuple(found.libraries) if found is not None else ():
        library = state.libraries.get(number)
        if library is not None:
            starting.lacking(state, library, lack)
