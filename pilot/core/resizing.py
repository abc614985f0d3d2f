"""A library's reservation changes while it lives: it grows once there is room for it, and shrinks when it says so."""

from __future__ import annotations

from stoker.pilot.core import station
from stoker.pilot.core.commands import Severity, TellLibrary
from stoker.pilot.core.state import CoreState, PilotLibrary
from stoker.protocol.ids import LibraryId
from stoker.protocol.to_agent import Resized
from stoker.protocol.to_library import Resize
from stoker.protocol.to_manager import LibraryResized


def order(state: CoreState, number: LibraryId, size: int) -> None:
    """The manager wants a library to hold `size` bytes on each of its devices; this replaces a growth that waits."""
    library = state.libraries.get(number)
    if library is None:
        return
    why_not = station.why_never(state, library.devices, size)
    if not library.has_process:
        why_not = "it has not begun to load"
    if why_not:
        refuse(state, library, why_not, ordered_bytes=size)
    elif size <= state.ledger.held(number):
        station.withdraw(state, library)
        tell(state, library, size)
    elif station.claim(state, library, size):
        tell(state, library, size)


def tell(state: CoreState, library: PilotLibrary, size: int) -> None:
    """A library may use `size` bytes of each of its devices, and no more."""
    library.resizes.append(size)
    state.out.append(TellLibrary(library.number, Resize(device_memory_bytes=size)))


def refuse(state: CoreState, library: PilotLibrary, why: str, *, ordered_bytes: int) -> None:
    """A library stays as it is, and does not come to hold what was ordered."""
    station.withdraw(state, library)
    state.log(f"lib-{library.number} is not resized: {why}", Severity.WARNING)
    stays(state, library, ordered_bytes=ordered_bytes)


def stays(state: CoreState, library: PilotLibrary, *, ordered_bytes: int) -> None:
    """Tell the manager that a library keeps its reservation."""
    held = station.budget_bytes(state, library)
    state.tell(LibraryResized(library.number, held, ordered_bytes=ordered_bytes))


def answered(state: CoreState, library: PilotLibrary, message: Resized) -> None:
    """A library has changed what it uses (or its context has refused to: a size below zero).

    What it was told since it may use already, so that much stays held: a shrink that it answers now may be followed by
    a growth to a part of what it had, for which no claim was made.
    """
    size = message.device_memory_bytes
    ordered = library.resizes.pop(0) if library.resizes else size
    try:
        if size >= 0:
            state.ledger.resize(library.number, memory_bytes=max([size, *library.resizes]))
    except ValueError as error:
        state.log(f"lib-{library.number}: {error}", Severity.WARNING)
    state.tell(LibraryResized(library.number, state.ledger.held(library.number), ordered_bytes=ordered))
