"""The backlog of a library that is stuck goes back to the queue (`stuck`)."""

from __future__ import annotations

from stoker.manager.core import holding, indexing
from stoker.manager.core.manager import Manager
from stoker.manager.core.stuck import LINGERS, STUCK_S, TIMER, full_since


def due(manager: Manager) -> None:
    """Take the backlog of every stuck library back to the queue."""
    state = manager.state
    looked = False
    for context in state.contexts.values():
        for library in tuple(context.index.least_loaded()):
            looked = True
            full = full_since(library)
            if full is None or state.now - full < max(STUCK_S, LINGERS * context.run_s):
                continue
            indexing.gets_stuck(manager, library)
            waiting = library.load - library.taking - library.slots
            if waiting > 0:
                holding.ask_back(manager, library, waiting)
    if looked and TIMER not in state.timers:
        indexing.schedule_backlog_check(manager)
