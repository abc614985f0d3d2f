"""The load indexes of contexts, and libraries that are stuck. This file alone writes them."""

from __future__ import annotations

from stoker.manager.core.load_index import CLOSED, FREE, FULL
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Library
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.stuck import STUCK_S, TIMER


def room(manager: Manager, library: Library) -> int:
    """How many calls a library may hold: as many as its policy says, but no more than its slots while it is stuck."""
    window = manager.policies.dispatch.window(manager.state, library)
    return min(window, library.slots) if library.stuck else window


def has_room(manager: Manager, library: Library) -> bool:
    """True if a library that serves calls may hold one more."""
    load = library.load
    if load < library.slots:
        return True
    return not library.stuck and load < manager.policies.dispatch.window(manager.state, library)


def relist(manager: Manager, library: Library) -> bool:
    """A library may have another load, or serve calls or none: list it anew, as the last of those like it. True if it
    may be given another call."""
    index, pilot = library.context.index, library.pilot
    usable = library.state is LibraryState.READY and pilot.state is PilotState.HERE and pilot.reserved is None
    held = len(library.held)
    if not usable or (held == 1 and library.suspect is not None):
        index.drop(library)
        index.end_burst(library)
        return False
    load = held + len(library.zombies)
    if load < library.slots:
        library.stuck = False
        index.put(library, FREE)
        return True
    room = not library.stuck and load < manager.policies.dispatch.window(manager.state, library)
    waiting = load - library.slots
    if waiting == FULL and not room:
        index.put(library, CLOSED)
        return False
    index.put(library, waiting)
    if TIMER not in manager.state.timers:
        schedule_backlog_check(manager)
    return room


def gave(library: Library, count: int, now: float) -> None:
    """A library is given `count` calls."""
    library.context.index.gave(library, count, now)


def schedule_backlog_check(manager: Manager) -> None:
    """See after a while whether libraries get on with what they hold (`backlogs`)."""
    manager.set_timer(TIMER, manager.state.now + STUCK_S)


def gets_stuck(manager: Manager, library: Library) -> None:
    """The calls of a library run for so long that none is to wait behind them."""
    library.stuck = True
    relist(manager, library)


def gets_on(library: Library) -> None:
    """A call of a library has ended."""
    library.stuck = False
