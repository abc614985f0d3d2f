"""How far calls are that print it and do not say it: every so often the advisor is asked what their libraries' logs
tell (`subjects.OfPace`).

Only where one call at a time writes into a log, and only of calls that have run for a while. A timer looks for them
while any call is sent or runs; it is not there in simulated worlds, whose pilots have no logs.
"""

from __future__ import annotations

from stoker.manager.core import verdicts
from stoker.manager.core.commands import AskAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Gang, Library
from stoker.manager.core.phases import LibraryState
from stoker.manager.core.subjects import OfPace

TIMER = "pace"
EVERY_S = 15.0
MOST = 64
"""At most so many calls are asked about at once; the others come the next time."""


def sent(manager: Manager, library: Library) -> None:
    """A library was sent calls."""
    if TIMER not in manager.state.timers and library.pilot.folder:
        manager.set_timer(TIMER, manager.state.now + EVERY_S)


def due(manager: Manager) -> None:
    """Ask about calls that have run for a while, and look again while any runs."""
    state = manager.state
    busy = [library for library in state.libraries.values() if library.held and library.pilot.folder]
    asked = [question for library in busy if (question := _question(manager, library)) is not None]
    first = int(state.now / EVERY_S) * MOST % max(1, len(asked))
    manager.out += (asked[first:] + asked[:first])[:MOST]
    if busy:
        manager.set_timer(TIMER, state.now + EVERY_S)


def _question(manager: Manager, library: Library) -> AskAdvice | None:
    state = manager.state
    if library.slots > 1 or library.zombies or library.state is not LibraryState.READY:
        return None
    call = next(iter(library.held.values()))
    runs_since = max(call.sent_at, library.ready_at, library.ended_at)
    if call.id in state.reports or isinstance(call.holder, Gang) or state.now - runs_since < EVERY_S:
        return None
    about, log = OfPace(library.id, call.id), verdicts.log_of(library)
    return AskAdvice(about, call.group.function.name, log, start=library.printed_to)
