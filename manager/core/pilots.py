"""Pilots: joined, disconnected, drained, lost; devices in quarantine; records repaired after a lost journal.

A pilot's way: here, cut off, draining, gone. The only writer of `Pilot.state`.

Pilots whose walltime ends are drained in time (`deadlines.drain_in_s`).

Devices that are kept free: because their pilot says that they have failed, or because a policy has said so.

A pilot probes its devices and tells which of them fail (`reported`): what runs there is lost, so its calls run again
elsewhere at once. A policy may also quarantine a device, or all of a pilot, for a while, because of verdicts on what
has failed there (`begin`): what runs there runs to its end, and nothing new comes. Both have one effect on placing:
`Device.fault`, which only this file writes.

The manager has lost a part of its journal: what its peers still know makes its picture whole again.

A host crash may take the end of a journal, and a damaged record leaves a hole. The manager that comes back then knows
less than it has acknowledged, and its peers do not keep what was acknowledged. It notices when they say hello
(`reliable`), and each peer says anew what it holds:

- A *client* is asked to submit again every call that it waits for (`ClientWelcome.again`). A call that the manager
  knows already stays as it is. One that the client does not name has had its end: it is forgotten. If it ran again
  meanwhile and failed (the file of its arguments is gone by then), that failure does not count.
- A *pilot*'s hello lists its libraries with their recipes and calls. A library that the manager does not know is
  adopted. A call that it does not know is an *orphan*: it keeps its place in the library, and goes on there when its
  client submits it again. If it ends before that, its end is kept for the client.
- The *factory* tells of blocks that the manager does not know (`block_orders`).

Numbers that the lost part had given away must not be given again, so a manager that came back leaves a gap before the
next one (`leave_gaps`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from stoker.manager.core import blocks, deadlines, ending, holding, libraries, objects, queues, registry, retries
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Client, Context, Device, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import JOURNAL_LOST, Orphan, State
from stoker.protocol import to_pilot
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CLIENT_SHIFT, CallId, LibraryId, PilotId, RecipeKey
from stoker.protocol.to_client import Results
from stoker.protocol.to_manager import LibraryFacts, PilotHello
from stoker.units import show_seconds

# So many pilots that are gone are kept: for their stories, and to tell them should they come back.
KEPT_PILOTS = 1000


def pilot_joins(manager: Manager, pilot: Pilot) -> None:
    """A pilot is here for the first time."""
    manager.state.pilots[pilot.id] = pilot


def pilot_reconnects(pilot: Pilot) -> None:
    """A pilot that was cut off is here again."""
    if pilot.state is PilotState.CUT:
        pilot.state = PilotState.HERE


def pilot_rejoins(manager: Manager, pilot: Pilot) -> None:
    """A pilot that was given up is here again."""
    state = manager.state
    del state.gone_pilots[pilot.id]
    state.pilots[pilot.id] = pilot
    state.pilots_gone -= 1
    pilot.state = PilotState.DRAINING if pilot.was is PilotState.DRAINING else PilotState.HERE


def drop_kept(pilot: Pilot) -> None:
    """What a pilot held when it was given up counts no more: it is here again, or forgotten."""
    pilot.kept = None


def forget_old_pilots(state: State, *, kept_s: float) -> None:
    """Pilots that have been gone for so long do not come back."""
    for pilot in state.gone_pilots.values():
        if state.now - pilot.lost_at >= kept_s:
            drop_kept(pilot)


def supply_changed(manager: Manager, pilot: Pilot) -> None:
    """A pilot has come, gone, or changed its state: tell everybody who plans with it."""
    for context in {library.context.recipe.key: library.context for library in pilot.libraries.values()}.values():
        queues.note_starving(manager, context)
        holding.places_changed(manager, context)
        if context.queue.gangs:
            holding.serve_after(manager, context)
    manager.supply_changed = True
    manager.changed("pilots", pilot.id)


def pilot_disconnected(manager: Manager, id: PilotId) -> None:
    """A pilot's connection broke: nothing more is sent there until it is back or given up."""
    pilot = manager.state.pilots.get(id)
    if pilot is None or pilot.state is not PilotState.HERE:
        return
    pilot.state = PilotState.CUT
    pilot.note(manager.state.now, "its connection broke")
    objects.pilot_cut(manager, pilot)
    for library in pilot.libraries.values():
        queues.relist_library(manager, library)
    supply_changed(manager, pilot)


def pilot_lost(
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
        keep_held(pilot)
    state.pilots_gone += 1
    blocks.pilot_left(manager, pilot, loss=None if pilot.released or state.ending else loss)
    objects.pilot_left(manager, pilot)
    pilot.state = PilotState.GONE
    pilot.note(state.now, f"gone: {reason}")
    retries.note_pilot_loss(manager, pilot)
    for library in list(pilot.libraries.values()):
        libraries.lose_library(manager, library, reason=reason)
    for device in pilot.devices.values():
        libraries.update_tier(manager, device)
    state.gone_pilots[id] = pilot
    if len(state.gone_pilots) > KEPT_PILOTS:
        del state.gone_pilots[next(iter(state.gone_pilots))]
    supply_changed(manager, pilot)


def lose_pilots_of(manager: Manager, blocks: Collection[str]) -> None:
    """Blocks of a program have ended: their pilots that are disconnected are gone."""
    for pilot in [each for each in manager.state.pilots.values() if each.block in blocks]:
        if pilot.state is PilotState.CUT:
            pilot_lost(manager, pilot.id, f"its block {pilot.block} has ended")


def release_pilots_of(manager: Manager, block: str) -> None:
    """Release the pilots of a block."""
    for pilot in manager.state.pilots.values():
        if pilot.block == block:
            release_pilot(manager, pilot, f"block {block} is released")


def release_pilot(manager: Manager, pilot: Pilot, reason: str) -> None:
    """Drain a pilot and let it end: it gets nothing new, finishes what it runs, and gives back the rest."""
    pilot.released = True
    if pilot.state in (PilotState.DRAINING, PilotState.GONE):
        return
    pilot.state = PilotState.DRAINING
    pilot.note(manager.state.now, f"draining: {reason}")
    hand_on_s = objects.pilot_drains(manager, pilot)
    for library in pilot.libraries.values():
        holding.unsend(manager, library, why=f"back in the queue: {pilot.id} is to end")
        queues.relist_library(manager, library)
    manager.say(pilot, to_pilot.Exit(reason, drain=True, hand_on_s=hand_on_s))
    supply_changed(manager, pilot)


def pilot_leaves(manager: Manager, pilot: Pilot) -> None:
    """A pilot has refused to load, without fault: it is leaving, whatever the reason, and gets nothing new."""
    if pilot.state is PilotState.HERE:
        pilot.state = PilotState.DRAINING
        pilot.note(manager.state.now, "draining: it is about to leave")
        objects.pilot_drains(manager, pilot)
        for library in pilot.libraries.values():
            holding.unsend(manager, library, why=f"back in the queue: {pilot.id} is about to leave")
            queues.relist_library(manager, library)
        supply_changed(manager, pilot)


def keep_held(pilot: Pilot) -> None:
    """Before a pilot is given up: note what it held, and what was promised for it."""
    pilot.kept = {library.id: (library, library.promised_bytes, library.state) for library in pilot.libraries.values()}
    pilot.was = pilot.state


# ---- draining
_POLL_S = 1.0

# A timer that was rounded may fire so much early: it would ask for one in no time at all, for ever.
_SOON_S = 0.001


def note_walltime(manager: Manager, pilot: Pilot, ends_in_s: float) -> None:
    """A pilot has said what is left of its walltime; 0 = no limit."""
    if ends_in_s <= 0:
        pilot.ends_at = 0.0
        return
    now = manager.state.now
    pilot.ends_at = now + ends_in_s
    pilot.lasts_s = max(pilot.lasts_s, ends_in_s)
    manager.set_timer(f"walltime/{pilot.id}", deadlines.drain_soonest_at(pilot, now))


def check_walltime(manager: Manager, id: str) -> None:
    """A pilot's time may be up: drain it, or look again later."""
    pilot = manager.state.pilots.get(id)  # type: ignore[call-overload]
    now = manager.state.now
    in_s = deadlines.drain_in_s(pilot, now) if pilot is not None else math.inf
    if pilot is None or in_s == math.inf or pilot.state is PilotState.DRAINING:
        return
    if in_s > _SOON_S:  # calls may turn out to take longer: look in time
        manager.set_timer(f"walltime/{id}", now + max(in_s / 2, min(in_s, _POLL_S)))
        return
    for library in pilot.libraries.values():
        if library.state is LibraryState.LOADING:
            libraries.record_cut_load(library, now)
    release_pilot(manager, pilot, f"its walltime is over in {deadlines.walltime_left_s(pilot, now):.0f} s")


# ---- quarantine
QUARANTINE_TIMER = "quarantine"


def device_reported(manager: Manager, device: Device, reason: str) -> None:
    """A device failed its probe, or is well again (no reason): what holds it or loads on it ends there, and its calls
    run again."""
    pilot, id = device.pilot, device.id
    if device.reported == reason:  # its hello has told it
        return
    device.reported = reason
    _settle(device)
    if not reason:
        pilot.note(manager.state.now, f"{id} is well again")
        supply_changed(manager, pilot)
        return
    pilot.note(manager.state.now, f"{id} quarantined: {reason}")
    for library in tuple(device.libraries.values()):
        for call in tuple(library.held.values()):
            holding.withdraw(manager, call, running=True)
            holding.requeue(manager, (call,), why=f"{id} of {pilot.id} is quarantined ({reason}), not counted as a try")
        libraries.stop_library(manager, library, reason=f"{id} is quarantined: {reason}")
    supply_changed(manager, pilot)


def quarantine_devices(manager: Manager, pilot: Pilot, devices: list[Device], *, reason: str, until: float) -> None:
    """Keep devices of a pilot free until then: their libraries end after what they run."""
    now = manager.state.now
    for device in devices:
        device.quarantine = (until, reason)
        _settle(device)
    which = ", ".join(device.id for device in devices)
    pilot.note(now, f"{which} quarantined for {show_seconds(until - now)}: {reason}")
    for library in {library.id: library for device in devices for library in device.libraries.values()}.values():
        libraries.stop_library(manager, library, reason=f"quarantined: {reason}")
    _set_timer(manager, pilot)
    supply_changed(manager, pilot)


def end_quarantine(manager: Manager, id: str) -> None:
    """A quarantine of a pilot's devices may be over. A pilot that is gone may come back."""
    state, now = manager.state, manager.state.now
    pilot = state.pilots.get(PilotId(id)) or state.gone_pilots.get(PilotId(id))
    if pilot is None:
        return
    over = [device for device in pilot.devices.values() if device.quarantine and device.quarantine[0] <= now]
    for device in over:
        device.quarantine = None
        _settle(device)
    if over:
        pilot.note(now, f"{', '.join(device.id for device in over)} may be used again")
        if pilot.id in state.pilots:
            supply_changed(manager, pilot)
    _set_timer(manager, pilot)


def _set_timer(manager: Manager, pilot: Pilot) -> None:
    ends = [device.quarantine[0] for device in pilot.devices.values() if device.quarantine]
    if ends:
        manager.set_timer(f"{QUARANTINE_TIMER}/{pilot.id}", min(ends))


def _settle(device: Device) -> None:
    device.fault = device.reported or (device.quarantine[1] if device.quarantine else "")


# ---- after a lost journal
KEPT_FORGOTTEN = 100_000  # So many calls are remembered whose clients have their results already


def skip_numbers(state: State) -> None:
    """The manager came back: begin its next numbers at a round one behind those that it may have given away."""
    if state.next_library > 1 or state.next_client:
        libraries.skip_library_numbers(state)
        registry.skip_client_numbers(state)
    if state.next_block > 1:
        blocks.skip_block_numbers(state)


# ---- clients
def ask_client_again(manager: Manager, client: Client) -> None:
    """Note which calls of a client are open, or have ended since the manager came back. If the client
    does not submit a call again, it has the result already. The manager sends it no result until it has submitted."""
    manager.state.notice(JOURNAL_LOST)
    client.unnamed = {id for id, call in manager.state.calls.items() if call.group.client is client}
    client.unnamed.update(end.call for end in client.unacked)


def client_resubmitted(manager: Manager, client: Client) -> None:
    """A client has said everything again."""
    state = manager.state
    unnamed, client.unnamed = client.unnamed, None
    if unnamed is None:
        state.refuse("a client that was not asked to has submitted its calls again")
        return
    for id in sorted(unnamed):
        call = state.calls.get(id)
        if call is not None:
            ending.end_silently(manager, call)
        state.forgotten[id] = None
    _tell_of_ends(manager, client, unnamed)
    while len(state.forgotten) > KEPT_FORGOTTEN:
        del state.forgotten[next(iter(state.forgotten))]
    for id, orphan in list(state.orphans.items()):
        if id >> CLIENT_SHIFT == client.number:
            del state.orphans[id]
            state.forgotten[id] = None
            _drop(manager, orphan.library, CallId(id), running=False)


def _tell_of_ends(manager: Manager, client: Client, unnamed: set[int]) -> None:
    """Tell a client of the ends that had to wait until it had said which calls it waits for."""
    for end in client.unacked:
        if end.call in unnamed and end.failure is not None:
            ending.forget_failure(manager.state, end)
    client.unacked = deque(end for end in client.unacked if end.call not in unnamed)
    if client.unacked and client.connected:
        manager.tell(client, Results(client.first_unacked, list(client.unacked)))


# ---- orphans
def is_unheard_of(state: State, id: int) -> bool:
    """Whether a call that is not open was never submitted, as far as this manager knows."""
    number = id >> CLIENT_SHIFT
    client = state.clients_by_number.get(number)
    if client is None:
        return number not in state.departed
    return client.unnamed is not None or id > client.last_call


def take_orphan(manager: Manager, library: Library, id: CallId) -> None:
    """A library runs a call that the manager has never heard of: it goes on, and its client will submit it again."""
    holding.occupy(library, id)
    manager.state.orphans[id] = Orphan(library)
    manager.state.notice(JOURNAL_LOST)


def claim_orphans(manager: Manager, fresh: list[Call]) -> list[Call]:
    """Of calls that have just come, those that are orphans go on where they run, or end. Returns the others."""
    orphans, rest = manager.state.orphans, []
    for call in fresh:
        orphan = orphans.pop(call.id, None)
        if orphan is None or not _goes_on(manager, orphan, call):
            rest.append(call)
    return rest


def _goes_on(manager: Manager, orphan: Orphan, call: Call) -> bool:
    library = orphan.library
    if orphan.end is not None:
        call.note(manager.state.now, "it had ended before its client could submit it again")
        ending.end_call(manager, call, orphan.end, waits=False)
        return True
    if manager.state.libraries.get(library.id) is not library or call.id not in library.zombies:
        return False
    if not holding.may_go_on(library, call):
        _drop(manager, library, call.id, running=call.group.options.gang[1] > 1)
        return False
    holding.resume(manager, library, call, why="it ran there while the manager did not know of it: it goes on")
    return True


def end_orphan(state: State, outcome: CallEnd) -> bool:
    """Keep the end of an orphan until its client submits it again. False if the call is none."""
    orphan = state.orphans.get(outcome.call)
    if orphan is not None:
        orphan.end = outcome
    return orphan is not None


def orphan_failed(state: State, id: CallId) -> None:
    """The infrastructure failed a call, which is no end: if it is an orphan, it runs when its client submits it."""
    state.orphans.pop(id, None)


def _drop(manager: Manager, library: Library, id: CallId, *, running: bool) -> None:
    if manager.state.libraries.get(library.id) is library and id in library.zombies:
        holding.drop(manager, library, id, running=running, of_gang=running)


# ---- pilots
def note_numbers(state: State, message: PilotHello) -> None:
    """Give no number again that this pilot knows a library by."""
    known = max((facts.library for facts in message.libraries), default=0)
    libraries.reserve_library_number(state, max(known, message.last_library))


def adopt_library(manager: Manager, pilot: Pilot, facts: LibraryFacts, message: PilotHello) -> Library | None:
    """Take a library that the manager does not know for its own; None if that cannot be."""
    state = manager.state
    devices = tuple(pilot.devices[id] for id in dict.fromkeys(facts.devices) if id in pilot.devices)
    context = _context(manager, facts.recipe, message)
    taken = facts.library in state.libraries
    if state.ending or taken or context is None or not devices or len(devices) != len(facts.devices):
        return None
    library = Library(LibraryId(facts.library), context, pilot, devices, 0, state.now)
    libraries.record_use(library, memory_bytes=facts.memory_bytes, device_bytes=facts.device_bytes, now=state.now)
    try:
        libraries.adopt_found_library(manager, library, reserved_bytes=facts.reserved_bytes, is_hot=facts.ready)
    except PolicyError:
        return None
    if facts.ready:
        blocks.note_useful(manager, pilot)
    manager.state.notice(JOURNAL_LOST)
    return library


def _context(manager: Manager, key: RecipeKey, message: PilotHello) -> Context | None:
    known = manager.state.contexts.get(key)
    if known is not None:
        return known
    recipe = next((recipe for recipe in message.recipes if recipe.key == key), None)
    return registry.define_context(manager, recipe) if recipe is not None else None
