"""Pilots that cannot hold a context, through no fault of the context: their disk is full, or does not take writes.

Counting such a load against the recipe would give up a sound one because of one bad node. So the pilot is left alone,
for that context where an object of it did not fit, for all where nothing could be written at all, until `AGAIN_S` has
gone by (somebody may have made room) or a load works there. Nobody else needs to know: others take over.
"""

from __future__ import annotations

from stoker.manager.core.state import Library, Pilot, State
from stoker.manager.protocol.calls import Failure
from stoker.manager.protocol.to_manager import LibraryPhase

AGAIN_S = 300.0
"""A pilot that was found unfit is tried again after so long."""

EVERY = ""
"""In place of a recipe's key: every context."""


def blame(state: State, library: Library, failure: Failure, *, loading: bool) -> None:
    """A library has failed for what its pilot lacks."""
    pilot, context = library.pilot, library.context
    everything = loading and library.phase is not LibraryPhase.FETCHING
    what = "anything" if everything else context.recipe.name
    pilot.unfit[EVERY if everything else context.recipe.key] = state.now + AGAIN_S, failure.message
    pilot.notes.append((state.now, f"cannot hold {what}: {failure.message}"))


def forgive(pilot: Pilot, key: str) -> None:
    """A context has loaded there, or is to be tried there again."""
    pilot.unfit.pop(EVERY, None)
    pilot.unfit.pop(key, None)


def unfit(pilot: Pilot, key: str, now: float) -> str:
    """Why a pilot cannot hold a context just now; empty if nothing speaks against it."""
    for about in (EVERY, key):
        until, why = pilot.unfit.get(about, (0.0, ""))
        if now < until:
            return why
    return ""


def troubles(state: State) -> dict[str, str]:
    """What pilots lack just now, by pilot."""
    found = {}
    for pilot in state.pilots.values():
        said = [why for until, why in pilot.unfit.values() if state.now < until]
        if said:
            found[str(pilot.id)] = "; ".join(dict.fromkeys(said))
    return found
