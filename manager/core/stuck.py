"""A library is stuck while every slot of it is taken for long by the same calls.

Short calls are prefetched into libraries whose calls are known to be short (`Dispatch.window`). One of those calls may
run for hours all the same: a function's time depends on its arguments. What waits behind it goes back to the queue
then, and the library is given no backlog until a call of it ends. A timer looks for such libraries once a second while
any library has a backlog, or room for one.

A context whose calls wait is loaded elsewhere as if its *lingering* libraries were not there: those whose calls have
run for longer than a load takes, and several times as long as their functions usually do.
"""

from __future__ import annotations

from itertools import islice

from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Library
from stoker.manager.protocol.to_pilot import TakeBack

TIMER = "stuck"
STUCK_S = 1.0
"""Calls that have taken every slot for so long, and far longer than is usual in their context, hold up what waits
behind them."""
LINGERS = 4
"""Once a call has run this many times longer than its function usually does, nobody can say when it will end."""


def room(manager: Manager, library: Library) -> int:
    """How many calls a library may hold: as many as its policy says, but no more than its slots while it is stuck."""
    window = manager.policies.dispatch.window(manager.state, library)
    return min(window, library.slots) if library.stuck else window


def look_soon(manager: Manager) -> None:
    """See after a while whether libraries get on with what they hold."""
    manager.set_timer(TIMER, manager.state.now + STUCK_S)


def due(manager: Manager) -> None:
    """Take the backlog of every stuck library back to the queue."""
    state = manager.state
    looked = False
    for context in state.contexts.values():
        for library in {**context.backlogged, **context.roomy}.values():
            looked = True
            full = _full_since(library)
            if full is None or state.now - full < max(STUCK_S, LINGERS * context.run_s):
                continue
            library.stuck = True
            context.roomy.pop(library.id, None)
            waiting = library.load - library.taking - library.slots
            if waiting > 0:
                library.taking += waiting
                manager.say(library.pilot, TakeBack(library.id, waiting))
    if looked:
        look_soon(manager)


def lingers(now: float, library: Library, *, load_s: float) -> bool:
    """Whether calls take every slot of a library for so long that a load elsewhere may well be done before they are."""
    full = _full_since(library)
    if full is None or now - full < max(STUCK_S, load_s):
        return False
    running = islice(library.held.values(), library.slots)
    usual_s = max((call.group.cost.run_s for call in running), default=library.context.run_s)
    return now - full >= LINGERS * usual_s


def _full_since(library: Library) -> float | None:
    """Since when the same calls take every slot of a library; None if a slot is free."""
    place = library.slots - 1 - len(library.zombies)
    if place < 0:
        return library.ended_at
    last = next(islice(library.held.values(), place, None), None)
    return None if last is None else max(last.sent_at, library.ended_at)
