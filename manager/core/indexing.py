"""Which libraries of a context have room, and which hold more calls than slots. This file alone writes that."""

from __future__ import annotations

from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Filling, Library
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.stuck import STUCK_S, TIMER


def room(manager: Manager, library: Library) -> int:
    """How many calls a library may hold: as many as its policy says, but no more than its slots while it is stuck."""
    window = manager.policies.dispatch.window(manager.state, library)
    return min(window, library.slots) if library.stuck else window


def relist(manager: Manager, library: Library) -> None:
    """A library may have another load, or serve calls or none: list it anew, as the last of those like it."""
    context, id = library.context, library.id
    context.idle.pop(id, None)
    context.roomy.pop(id, None)
    context.backlogged.pop(id, None)
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
    if (has_room or load > library.slots) and TIMER not in manager.state.timers:
        look_soon(manager)


def fills(library: Library, count: int, now: float) -> None:
    """A library is given so many calls."""
    filling = library.context.filling
    if filling is not None and filling.library is library and filling.at == now:
        filling.calls += count
    else:
        library.context.filling = Filling(library, now, count)


def look_soon(manager: Manager) -> None:
    """See after a while whether libraries get on with what they hold (`backlogs`)."""
    manager.set_timer(TIMER, manager.state.now + STUCK_S)


def gets_stuck(library: Library) -> None:
    """The calls of a library run for so long that none is to wait behind them."""
    library.stuck = True
    library.context.roomy.pop(library.id, None)


def gets_on(library: Library) -> None:
    """A call of a library has ended."""
    library.stuck = False
