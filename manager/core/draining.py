"""Pilots whose walltime ends are drained in time (`walltime.margin_s`)."""

from __future__ import annotations

from stoker.manager.core import loads, pilot_states, walltime
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.walltime import MOST_OF_IT

_LOOK_S = 1.0

# A timer that was rounded may fire so much early: it would ask for one in no time at all, for ever.
_SOON_S = 0.001


def note(manager: Manager, pilot: Pilot, ends_in_s: float) -> None:
    """A pilot has said what is left of its walltime; 0 = no limit."""
    if ends_in_s <= 0:
        pilot.ends_at = 0.0
        return
    now = manager.state.now
    pilot.ends_at = now + ends_in_s
    pilot.lasts_s = max(pilot.lasts_s, ends_in_s)
    manager.set_timer(f"walltime/{pilot.id}", max(now, pilot.ends_at - MOST_OF_IT * pilot.lasts_s))


def due(manager: Manager, id: str) -> None:
    """A pilot's time may be up: drain it, or look again later."""
    pilot = manager.state.pilots.get(id)  # type: ignore[call-overload]
    if pilot is None or not pilot.ends_at or pilot.state is PilotState.DRAINING:
        return
    left = pilot.ends_at - manager.state.now
    margin = walltime.margin_s(
        pilot.lasts_s, run_s=max((x.context.run_s for x in pilot.libraries.values()), default=0.0)
    )
    if left > margin + _SOON_S:  # calls may turn out to take longer: look in time
        manager.set_timer(f"walltime/{id}", manager.state.now + max((left - margin) / 2, min(left - margin, _LOOK_S)))
        return
    for library in pilot.libraries.values():
        if library.state is LibraryState.LOADING:
            loads.cut_off(library, manager.state.now)
    pilot_states.release(manager, pilot, f"its walltime is over in {left:.0f} s")
