"""A pilot's way: here, cut off, draining, gone. The only writer of `Pilot.state`."""

from __future__ import annotations

from stoker.manager.core import blocks, holding, indexing, libraries, objects, queues, reservations, suspects
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.phases import PilotState
from stoker.manager.core.state import State
from stoker.protocol import to_pilot
from stoker.protocol.blocks import LossReason
from stoker.protocol.ids import PilotId

# So many pilots that are gone are kept: for their stories, and to tell them should they come back.
KEPT_PILOTS = 1000


def joins(manager: Manager, pilot: Pilot) -> None:
    """A pilot is here for the first time."""
    manager.state.pilots[pilot.id] = pilot


def reconnects(pilot: Pilot) -> None:
    """A pilot that was cut off is here again."""
    if pilot.state is PilotState.CUT:
        pilot.state = PilotState.HERE


def back(manager: Manager, pilot: Pilot) -> None:
    """A pilot that was given up is here again."""
    state = manager.state
    del state.gone_pilots[pilot.id]
    state.pilots[pilot.id] = pilot
    state.pilots_gone -= 1
    pilot.state = PilotState.DRAINING if pilot.was is PilotState.DRAINING else PilotState.HERE


def keeps_nothing(pilot: Pilot) -> None:
    """What a pilot held when it was given up counts no more: it is here again, or forgotten."""
    pilot.kept = None


def give_up_old(state: State, *, kept_s: float) -> None:
    """Pilots that have been gone for so long do not come back."""
    for pilot in state.gone_pilots.values():
        if state.now - pilot.lost_at >= kept_s:
            keeps_nothing(pilot)


def supply_changed(manager: Manager, pilot: Pilot) -> None:
    """A pilot has come, gone, or changed its state: tell everybody who plans with it."""
    for context in {library.context.recipe.key: library.context for library in pilot.libraries.values()}.values():
        queues.starving(manager, context)
        reservations.places_changed(manager, context)
        if context.queue.gangs:
            holding.serve_after(manager, context)
    manager.supply_changed = True
    manager.changed("pilots", pilot.id)


def cut(manager: Manager, id: PilotId) -> None:
    """A pilot's connection broke: nothing more is sent there until it is back or given up."""
    pilot = manager.state.pilots.get(id)
    if pilot is None or pilot.state is not PilotState.HERE:
        return
    pilot.state = PilotState.CUT
    pilot.note(manager.state.now, "its connection broke")
    objects.pilot_cut(manager, pilot)
    for library in pilot.libraries.values():
        indexing.relist(manager, library)
    supply_changed(manager, pilot)


def lost(
    manager: Manager,
    id: PilotId,
    reason: str,
    *,
    loss: LossReason | None = LossReason.UNEXPLAINED,
    may_return: bool = True,
) -> None:
    """A pilot is gone with everything that it held. `loss`: why it counts as lost, None if it left as it should; one
    that the manager told to end is not lost. `may_return`: it may be alive, and is taken back if it reconnects."""
    state = manager.state
    pilot = state.pilots.pop(id, None)
    if pilot is None:
        return
    if may_return:
        remember(pilot)
    state.pilots_gone += 1
    blocks.pilot_left(manager, pilot, loss=None if pilot.released or state.ending else loss)
    objects.pilot_left(manager, pilot)
    pilot.state = PilotState.GONE
    pilot.note(state.now, f"gone: {reason}")
    suspects.pilot_lost(manager, pilot)
    for library in list(pilot.libraries.values()):
        libraries.lost(manager, library, reason=reason)
    for device in pilot.devices.values():
        libraries.tier(manager, device)
    state.gone_pilots[id] = pilot
    if len(state.gone_pilots) > KEPT_PILOTS:
        del state.gone_pilots[next(iter(state.gone_pilots))]
    supply_changed(manager, pilot)


def release(manager: Manager, pilot: Pilot, reason: str) -> None:
    """Drain a pilot and let it end: it gets nothing new, finishes what it runs, and gives back the rest."""
    pilot.released = True
    if pilot.state in (PilotState.DRAINING, PilotState.GONE):
        return
    pilot.state = PilotState.DRAINING
    pilot.note(manager.state.now, f"draining: {reason}")
    hand_on_s = objects.pilot_drains(manager, pilot)
    for library in pilot.libraries.values():
        holding.unsend(manager, library, why=f"back in the queue: {pilot.id} is to end")
        indexing.relist(manager, library)
    manager.say(pilot, to_pilot.Exit(reason, drain=True, hand_on_s=hand_on_s))
    supply_changed(manager, pilot)


def leaves(manager: Manager, pilot: Pilot) -> None:
    """A pilot has refused to load, without fault: it is leaving, whatever the reason, and gets nothing new."""
    if pilot.state is PilotState.HERE:
        pilot.state = PilotState.DRAINING
        pilot.note(manager.state.now, "draining: it is about to leave")
        objects.pilot_drains(manager, pilot)
        for library in pilot.libraries.values():
            holding.unsend(manager, library, why=f"back in the queue: {pilot.id} is about to leave")
            indexing.relist(manager, library)
        supply_changed(manager, pilot)


def remember(pilot: Pilot) -> None:
    """Before a pilot is given up: note what it held, and what was promised for it."""
    pilot.kept = {library.id: (library, library.promised_bytes, library.state) for library in pilot.libraries.values()}
    pilot.was = pilot.state
