"""Pilots whose batch job ends: they are drained in time, and get no call that they could not finish.

A pilot says how much of its walltime is left. It is drained `margin_s` before the end: long enough for a call that it
runs to finish, as far as calls of its contexts have taken until now, and for its objects to be handed on. Until then a
call that is expected to run longer than what is left is kept from it (`has_time`), unless no pilot could ever give it
more: then one that has all its time still before it may try.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.state import Library, Pilot

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

MARGIN_S = 20.0
"""What is left of a walltime when a pilot of short calls is drained."""

CAUTION = 1.5
"""A call is taken to run this much longer than the mean."""


def note(core: Core, pilot: Pilot, ends_in_s: float) -> None:
    """A pilot has said what is left of its walltime; 0 = no limit."""
    if ends_in_s <= 0:
        pilot.ends_at = 0.0
        return
    now = core.state.now
    pilot.ends_at = now + ends_in_s
    pilot.lasts_s = max(pilot.lasts_s, ends_in_s)
    core.set_timer(f"walltime/{pilot.id}", max(now, pilot.ends_at - _MOST * pilot.lasts_s))


def due(core: Core, id: str) -> None:
    """A pilot's time may be up: drain it, or look again later."""
    from stoker.manager.core import pilots

    pilot = core.state.pilots.get(id)  # type: ignore[call-overload]
    if pilot is None or not pilot.ends_at or pilot.state is PilotState.DRAINING:
        return
    left = pilot.ends_at - core.state.now
    margin = margin_s(pilot.lasts_s, run_s=max((x.context.run_s for x in pilot.libraries.values()), default=0.0))
    if left > margin + _SOON_S:  # calls may turn out to take longer: look in time
        core.set_timer(f"walltime/{id}", core.state.now + max((left - margin) / 2, min(left - margin, _LOOK_S)))
        return
    for library in pilot.libraries.values():
        if library.state is LibraryState.LOADING:
            library.context.cut_loads += 1
            library.context.cut_after_s = max(library.context.cut_after_s, core.state.now - library.started_at)
    pilots.release(core, pilot, f"its walltime is over in {left:.0f} s")


def has_time(now: float, library: Library, run_s: float) -> bool:
    """Whether a call that usually runs so long would be done before the library's pilot ends."""
    pilot = library.pilot
    if not pilot.ends_at:
        return True
    needs = CAUTION * run_s + _GRACE_S
    left = pilot.ends_at - now
    return left >= needs or (needs > pilot.lasts_s and left > 0.9 * pilot.lasts_s)


_GRACE_S = 2.0
_MOST = 0.25
"""The margin is no more than this part of the whole time, so that short jobs do some work."""
_LOOK_S = 1.0
_SOON_S = 0.001
"""A timer that was rounded may fire so much early: it would ask for one in no time at all, for ever."""


def margin_s(lasts_s: float, *, run_s: float) -> float:
    """How long before its end a pilot is drained that lasts so long in all and whose calls run so long."""
    return min(max(MARGIN_S, CAUTION * run_s + _GRACE_S), _MOST * lasts_s)
