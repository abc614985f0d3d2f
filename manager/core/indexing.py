"""Which libraries of a context have room, and which hold more than their share."""

from __future__ import annotations

from stoker.manager.core import stuck
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Filling, Library
from stoker.manager.core.phases import LibraryState, PilotState


def reclass(manager: Manager, library: Library) -> None:
    """Put a library into those of its context's sets that it belongs to now, as the last there."""
    context, id = library.context, library.id
    context.idle.pop(id, None)
    context.roomy.pop(id, None)
    context.backlogged.pop(id, None)
    if library.suspect is not None and library.suspect.id not in library.held:
        library.suspect = None
    pilot = library.pilot
    usable = library.state is LibraryState.READY and pilot.state is PilotState.HERE and pilot.reserved is None
    if not usable or library.suspect:
        if context.filling is not None and context.filling.library is library:
            context.filling = None
        return
    load = len(library.held) + len(library.zombies)
    if load < library.slots:
        library.stuck = False
        context.idle[id] = library
        return
    has_room = not library.stuck and load < manager.policies.dispatch.window(manager.state, library)
    if load > library.slots:
        context.backlogged[id] = library
    if has_room:
        context.roomy[id] = library
    if (has_room or load > library.slots) and stuck.TIMER not in manager.state.timers:
        stuck.look_soon(manager)


def fills(library: Library, count: int, now: float) -> None:
    """A library is given so many calls."""
    filling = library.context.filling
    if filling is not None and filling.library is library and filling.at == now:
        filling.calls += count
    else:
        library.context.filling = Filling(library, now, count)
