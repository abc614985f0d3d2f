"""Pilots that are reserved for one call, which is to run alone there."""

from __future__ import annotations

from stoker.manager.core import indexing
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Pilot
from stoker.manager.core.trials import Trial


def places_changed(manager: Manager, context: Context) -> None:
    """Libraries of a context, or their pilots, have changed: calls that are apart may find a place now."""
    manager.apart_due |= any(each.queue.apart for each in (context, *context.listed_by.values()))


def trial_of(manager: Manager, call: Call) -> Trial:
    """What a call has lost, nothing at first."""
    return manager.state.trials.setdefault(call.id, Trial())


def reserve(manager: Manager, trial: Trial, pilot: Pilot, call: Call) -> None:
    """A pilot is given nothing but this call from now on."""
    trial.pilot, pilot.reserved = pilot, call
    manager.state.reserved[pilot.id] = pilot
    for library in pilot.libraries.values():
        indexing.relist(manager, library)


def ended(manager: Manager, id: int) -> None:
    """A call has ended."""
    trial = manager.state.trials.pop(id, None)
    if trial is not None:
        free(manager, trial)


def let_go(manager: Manager, call: Call) -> None:
    """A call is held by no library any more: the pilot that was reserved for it serves others."""
    trial = manager.state.trials.get(call.id)
    if trial is not None:
        free(manager, trial)


def free(manager: Manager, trial: Trial) -> None:
    """The pilot that was reserved serves others again."""
    pilot, trial.pilot = trial.pilot, None
    if pilot is None:
        return
    pilot.reserved = None
    manager.state.reserved.pop(pilot.id, None)
    manager.supply_changed = manager.apart_due = True
    for library in pilot.libraries.values():
        indexing.relist(manager, library)
        if library.context.queue.count:
            manager.returned[library.context] = None
