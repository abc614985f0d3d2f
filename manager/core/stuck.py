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

from stoker.manager.core.nouns import Library

TIMER = "stuck"
STUCK_S = 1.0
"""Calls that have taken every slot for so long, and far longer than is usual in their context, hold up what waits
behind them."""
LINGERS = 4
"""Once a call has run this many times longer than its function usually does, nobody can say when it will end."""


def lingers(now: float, library: Library, *, load_s: float) -> bool:
    """Whether calls take every slot of a library for so long that a load elsewhere may well be done before they are."""
    full = full_since(library)
    if full is None or now - full < max(STUCK_S, load_s):
        return False
    running = islice(library.held.values(), library.slots)
    usual_s = max((call.group.cost.run_s for call in running), default=library.context.run_s)
    return now - full >= LINGERS * usual_s


def full_since(library: Library) -> float | None:
    """Since when the same calls take every slot of a library; None if a slot is free."""
    place = library.slots - 1 - len(library.zombies)
    if place < 0:
        return library.ended_at
    last = next(islice(library.held.values(), place, None), None)
    return None if last is None else max(last.sent_at, library.ended_at)
