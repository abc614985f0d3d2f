"""Pilots whose walltime ends are drained in time (`walltime.drain_in_s`)."""

from __future__ import annotations

import math

from stoker.manager.core import loads, pilot_states, walltime
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.phases import LibraryState, PilotState

_POLL_S = 1.0

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
    manager.set_timer(f"walltime/{pilot.id}", walltime.drain_soonest_at(pilot, now))


def due(manager: Manager, id: str) -> None:
    """A pilot's time may be up: drain it, or look again later."""
    pilot = manager.state.pilots.get(id)  # type: ignore[call-overload]
    now = manager.state.now
    in_s = walltime.drain_in_s(pilot, now) if pilot is not None else math.inf
    if pilot is None or in_s == math.inf or pilot.state is PilotState.DRAINING:
        return
    if in_s > _SOON_S:  # calls may turn out to take longer: look in time
        manager.set_timer(f"walltime/{id}", now + max(in_s / 2, min(in_s, _POLL_S)))
        return
    for library in pilot.libraries.values():
        if library.state is LibraryState.LOADING:
            loads.cut_off(library, now)
    pilot_states.release(manager, pilot, f"its walltime is over in {walltime.left_s(pilot, now):.0f} s")
