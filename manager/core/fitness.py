"""Pilots that cannot hold a context, through no fault of the context: their disk is full, or does not take writes.

Counting such a load against the recipe would give up a sound one because of one bad node. So the pilot is left alone,
for that context where an object of it did not fit, for all where nothing could be written at all, until it is time to
try again or a load works there. Others take over meanwhile.

Many disks are full for seconds only: another job writes, and cleans up. So the first try comes soon, and further ones
come ever later (`AGAIN_S`). Calls whose only pilots are unfit wait for the first two tries.
"""

from __future__ import annotations

from stoker.manager.core.nouns import Library, Pilot
from stoker.manager.core.state import State
from stoker.protocol.calls import Failure
from stoker.protocol.to_manager import LibraryPhase

AGAIN_S = (5.0, 20.0, 80.0, 300.0)
"""A pilot that was found unfit is tried again after so long; the last of these counts for all further tries."""
LASTING_TIMES = 3
"""A pilot that was found unfit so often in a row is not expected to become fit soon."""

EVERY = ""
"""In place of a recipe's key: every context."""


def blame(state: State, library: Library, failure: Failure, *, loading: bool, waits_s: float = 0.0) -> None:
    """A library has failed for what its pilot lacks. `waits_s`: other libraries there have it and will let go of it, so
    that it is tried again after so long, however often; 0 = that is not so."""
    pilot, context = library.pilot, library.context
    everything = loading and library.phase is not LibraryPhase.FETCHING
    what = "anything" if everything else context.recipe.name
    key = EVERY if everything else context.recipe.key
    times = pilot.unfit_times.get(key, 0)
    pilot.unfit_times[key] = 0 if waits_s else times + 1
    again_s = waits_s or AGAIN_S[min(times, len(AGAIN_S) - 1)]
    known = waits_s and pilot.unfit.get(key, (0.0, ""))[1] == failure.message
    pilot.unfit[key] = state.now + again_s, failure.message
    if known:
        return
    pilot.note(state.now, f"cannot hold {what}: {failure.message}")


def forgive(pilot: Pilot, key: str) -> None:
    """A context has loaded there, or is to be tried there again."""
    for about in (EVERY, key):
        pilot.unfit.pop(about, None)
        pilot.unfit_times.pop(about, None)


def unfit(pilot: Pilot, key: str, now: float) -> str:
    """Why a pilot cannot hold a context just now; empty if nothing speaks against it."""
    for about in (EVERY, key):
        until, why = pilot.unfit.get(about, (0.0, ""))
        if now < until:
            return why
    return ""


def is_lasting(pilot: Pilot, key: str) -> bool:
    """True if a pilot was found unfit for a context several times in a row: calls need not wait for the next try."""
    return sum(pilot.unfit_times.get(about, 0) for about in (EVERY, key)) >= LASTING_TIMES


def troubles(state: State) -> dict[str, str]:
    """What pilots lack just now, by pilot."""
    found = {}
    for pilot in state.pilots.values():
        said = [why for until, why in pilot.unfit.values() if state.now < until]
        if said:
            found[str(pilot.id)] = "; ".join(dict.fromkeys(said))
    return found
