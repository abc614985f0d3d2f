"""Handle pilots that disconnect, drain or are lost; quarantine devices; repair the state if the journal lost records.

*Quarantine* (`Device.fault`): if a device fails its test, its calls are stopped and run elsewhere at once. If a policy
quarantines a device, its running calls end first.

*Lost journal records*: after a crash of the host, the journal may lack events that the manager has acknowledged. So
clients submit their open calls again, and pilots report their libraries and calls. A call that only a pilot knows is an
*orphan*. Until its client submits it again, the manager keeps its slot and its result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from stoker.manager.core import blocks, deadlines, ending, holding, libraries, objects, queues, registry, retries
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Client, Device, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import JOURNAL_LOST, OrphanCall, State, forget_oldest
from stoker.protocol import to_pilot
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CLIENT_SHIFT, CallId, LibraryId, PilotId
from stoker.protocol.to_client import Results
from stoker.protocol.to_manager import LibraryFacts, PilotHello, PilotLeaving, WalltimeUpdate
from stoker.units import show_seconds

KEPT_PILOTS = 1000  # Maximum number of ended pilots that are kept, for their histories and in case they reconnect


def mark_pilot_reconnected(manager: Manager, pilot: Pilot) -> None:
    pilot.note(manager.state.now, "reconnected")
    if pilot.state is PilotState.CUT:
        pilot.state = PilotState.HERE


def restore_pilot_record(manager: Manager, pilot: Pilot) -> None:
    state = manager.state
    del state.gone_pilots[pilot.id]
    state.pilots[pilot.id] = pilot
    state.pilots_gone -= 1
    pilot.state = PilotState.DRAINING if pilot.state_before_loss is PilotState.DRAINING else PilotState.HERE


def mark_supply_changed(manager: Manager, pilot: Pilot) -> None:
    for context in {library.context.recipe.key: library.context for library in pilot.libraries.values()}.values():
        queues.update_starved_since(manager, context)
        holding.mark_set_aside_calls_due(manager, context)
        if context.queue.gang_count:
            holding.schedule_queue_serving(manager, context)
    manager.supply_changed = True
    manager.mark_changed("pilots", pilot.id)


def mark_pilot_disconnected(manager: Manager, id: PilotId) -> None:
    pilot = manager.state.pilots.get(id)
    if pilot is None or pilot.state is not PilotState.HERE:
        return
    pilot.state = PilotState.CUT
    pilot.note(manager.state.now, "its connection broke")
    objects.disconnect_peer(manager, pilot)
    for library in pilot.libraries.values():
        queues.update_load_index(manager, library)
    mark_supply_changed(manager, pilot)


def remove_ended_pilot(
    manager: Manager, id: PilotId, reason: str, *, loss: LossReason | None = LossReason.UNEXPLAINED,
    may_return: bool = True,
) -> None:  # fmt: skip
    """Remove a pilot and requeue its calls. `loss`: why it was lost; None if it exited properly. `may_return`: True if
    the manager accepts the pilot when it reconnects.
    """
    state = manager.state
    pilot = state.pilots.pop(id, None)
    if pilot is None:
        return
    if may_return:
        pilot.restorable_libraries = {x.id: (x, x.promised_bytes, x.state) for x in pilot.libraries.values()}
        pilot.state_before_loss = pilot.state
    state.pilots_gone += 1
    blocks.remove_pilot_from_block(manager, pilot, loss=None if pilot.is_released or state.end_reason else loss)
    objects.disconnect_peer(manager, pilot)
    state.transfers.peers.pop(id, None)
    pilot.state = PilotState.GONE
    pilot.note(state.now, f"gone: {reason}")
    retries.record_losses_of_running_calls(manager, pilot)
    for library in list(pilot.libraries.values()):
        libraries.remove_lost_library(manager, library, reason=reason)
    libraries.update_device_tiers(manager, pilot.devices.values())
    state.gone_pilots[id] = pilot
    forget_oldest(state.gone_pilots, max_records=KEPT_PILOTS)
    mark_supply_changed(manager, pilot)


def remove_leaving_pilot(manager: Manager, pilot: Pilot, message: PilotLeaving) -> None:
    remove_ended_pilot(manager, pilot.id, message.reason, loss=message.loss, may_return=False)


def lose_pilots_of_ended_blocks(manager: Manager, blocks: Collection[str]) -> None:
    for pilot in [each for each in manager.state.pilots.values() if each.block in blocks]:
        if pilot.state is PilotState.CUT:
            remove_ended_pilot(manager, pilot.id, f"its block {pilot.block} has ended")


def release_block_pilots(manager: Manager, block: str) -> None:
    for pilot in manager.state.pilots.values():
        if pilot.block == block:
            release_pilot(manager, pilot, f"block {block} is released")


def release_pilot(manager: Manager, pilot: Pilot, reason: str) -> None:
    pilot.is_released = True
    if pilot.state in (PilotState.HERE, PilotState.CUT):
        hand_on_s = _start_draining(manager, pilot, reason, why=f"{pilot.id} drains")
        manager.send_to_pilot(pilot, to_pilot.Exit(reason, drain=True, hand_on_s=hand_on_s))
        mark_supply_changed(manager, pilot)


def drain_exiting_pilot(manager: Manager, pilot: Pilot) -> None:
    if pilot.state is PilotState.HERE:
        _start_draining(manager, pilot, "it exits soon", why=f"{pilot.id} exits soon")
        mark_supply_changed(manager, pilot)


def _start_draining(manager: Manager, pilot: Pilot, reason: str, *, why: str) -> float:
    pilot.state = PilotState.DRAINING
    pilot.note(manager.state.now, f"draining: {reason}")
    hand_on_s = objects.exclude_draining_pilot(manager, pilot)
    for library in pilot.libraries.values():
        holding.requeue_unsent_calls(manager, library, why=f"back in the queue: {why}")
        queues.update_load_index(manager, library)
    return hand_on_s


_MIN_WALLTIME_CHECK_S = 1.0


def set_pilot_walltime(manager: Manager, pilot: Pilot, ends_in_s: float) -> None:
    if ends_in_s <= 0:
        pilot.ends_at = 0.0
        return
    now = manager.state.now
    pilot.ends_at = now + ends_in_s
    pilot.longest_walltime_left_s = max(pilot.longest_walltime_left_s, ends_in_s)
    manager.set_timer(f"walltime/{pilot.id}", deadlines.earliest_drain_time(pilot, now))


def update_pilot_walltime(manager: Manager, pilot: Pilot, message: WalltimeUpdate) -> None:
    set_pilot_walltime(manager, pilot, message.ends_in_s)
    mark_supply_changed(manager, pilot)


def check_walltime(manager: Manager, id: str) -> None:
    pilot = manager.state.pilots.get(PilotId(id))
    now = manager.state.now
    in_s = deadlines.seconds_until_drain(pilot, now) if pilot is not None else math.inf
    if pilot is None or in_s == math.inf or pilot.state is PilotState.DRAINING:
        return
    if in_s > deadlines.TIMER_MARGIN_S:  # check before this time: calls may take longer than expected
        manager.set_timer(f"walltime/{id}", now + max(in_s / 2, min(in_s, _MIN_WALLTIME_CHECK_S)))
        return
    for library in pilot.libraries.values():
        if library.state is LibraryState.LOADING and not library.is_waking:
            context = library.context
            context.loads_cut_by_walltime += 1
            context.longest_cut_load_s = max(context.longest_cut_load_s, now - library.started_at)
    release_pilot(manager, pilot, f"its walltime is over in {deadlines.walltime_left_s(pilot, now):.0f} s")


QUARANTINE_TIMER = "quarantine"


def record_device_health(manager: Manager, device: Device, reason: str) -> None:
    """Record that a device failed its probe, or that it works again (if `reason` is empty)."""
    pilot, id = device.pilot, device.id
    if device.reported == reason:  # the hello has already reported this fault
        return
    device.reported = reason
    pilot.note(manager.state.now, f"{id} quarantined: {reason}" if reason else f"{id} works again")
    for library in tuple(device.libraries.values()) if reason else ():
        for call in tuple(library.held.values()):
            holding.withdraw_call(manager, call, stops_running=True)
            holding.requeue_calls(
                manager, (call,), why=f"{id} of {pilot.id} is quarantined ({reason}), not counted as a try"
            )
        libraries.stop_library(manager, library, reason=f"{id} is quarantined: {reason}")
    mark_supply_changed(manager, pilot)


def quarantine_devices(manager: Manager, pilot: Pilot, devices: list[Device], *, reason: str, until: float) -> None:
    """Quarantine devices. Libraries on the devices stop when their running calls have ended."""
    now = manager.state.now
    for device in devices:
        device.quarantine = (until, reason)
    which = ", ".join(device.id for device in devices)
    pilot.note(now, f"{which} quarantined for {show_seconds(until - now)}: {reason}")
    for library in {library.id: library for device in devices for library in device.libraries.values()}.values():
        libraries.stop_library(manager, library, reason=f"quarantined: {reason}")
    _schedule_quarantine_end(manager, pilot)
    mark_supply_changed(manager, pilot)


def end_quarantine(manager: Manager, id: str) -> None:
    state, now = manager.state, manager.state.now
    pilot = state.pilots.get(PilotId(id)) or state.gone_pilots.get(PilotId(id))
    if pilot is None:
        return
    over = [device for device in pilot.devices.values() if device.quarantine and device.quarantine[0] <= now]
    for device in over:
        device.quarantine = None
    if over:
        pilot.note(now, f"{', '.join(device.id for device in over)} may be used again")
        if pilot.id in state.pilots:
            mark_supply_changed(manager, pilot)
    _schedule_quarantine_end(manager, pilot)


def _schedule_quarantine_end(manager: Manager, pilot: Pilot) -> None:
    ends = [device.quarantine[0] for device in pilot.devices.values() if device.quarantine]
    if ends:
        manager.set_timer(f"{QUARANTINE_TIMER}/{pilot.id}", min(ends))


# Maximum number of kept ids of ended calls whose clients already have the results
KEPT_ENDED_CALL_IDS = 100_000


def begin_client_resubmission(manager: Manager, client: Client) -> None:
    """Note which calls a client must submit again. Calls that it does not submit again have ended."""
    manager.state.add_notice(JOURNAL_LOST)
    client.unnamed = {id for id, call in manager.state.calls.items() if call.group.client is client}
    client.unnamed.update(end.call for end in client.unacked)


def end_call_resubmission(manager: Manager, client: Client) -> None:
    state = manager.state
    unnamed, client.unnamed = client.unnamed, None
    if unnamed is None:
        state.count_refusal("resubmission of calls that the manager did not request")
        return
    for id in sorted(unnamed):
        if (call := state.calls.get(id)) is not None:
            ending.end_call_without_result(manager, call)
        state.calls_with_lost_results[id] = None
    for end in client.unacked:
        if end.call in unnamed and end.failure is not None:
            ending.uncount_call_failure(state, end)
    client.unacked = deque(end for end in client.unacked if end.call not in unnamed)
    if client.unacked and client.connected:
        manager.send_to_client(client, Results(client.first_unacked, list(client.unacked)))
    forget_oldest(state.calls_with_lost_results, max_records=KEPT_ENDED_CALL_IDS)
    for id, orphan in list(state.orphans.items()):
        if id >> CLIENT_SHIFT == client.number:
            del state.orphans[id]
            state.calls_with_lost_results[id] = None
            _order_drop_if_running(manager, orphan.library, CallId(id), running=False)


def is_unsubmitted_call_id(state: State, id: int) -> bool:
    number = id >> CLIENT_SHIFT
    client = state.clients_by_number.get(number)
    if client is None:
        return number not in state.removed_client_numbers
    return client.unnamed is not None or id > client.last_call


def record_orphan_call(manager: Manager, library: Library, id: CallId) -> None:
    holding.occupy_library_slot(library, id)
    manager.state.orphans[id] = OrphanCall(library)
    manager.state.add_notice(JOURNAL_LOST)


def claim_orphans(manager: Manager, fresh: list[Call]) -> list[Call]:
    """Continue or end submitted calls that a pilot already runs or has run (orphans). Return the other calls."""
    orphans, rest = manager.state.orphans, []
    for call in fresh:
        orphan = orphans.pop(call.id, None)
        if orphan is None or not _claim_orphan(manager, orphan, call):
            rest.append(call)
    return rest


def _claim_orphan(manager: Manager, orphan: OrphanCall, call: Call) -> bool:
    library = orphan.library
    if orphan.end is not None:
        call.note(manager.state.now, "the call ended before its client submitted it again")
        ending.end_call(manager, call, orphan.end, may_be_queued=False)
        return True
    if manager.state.libraries.get(library.id) is not library or call.id not in library.withdrawn_calls:
        return False
    if not holding.can_continue_call(library, call):
        _order_drop_if_running(manager, library, call.id, running=call.group.options.gang[1] > 1)
        return False
    holding.resume_call(manager, library, call, why="the call ran there without a record in the manager, and continues")
    return True


def end_orphan_call(state: State, outcome: CallEnd) -> bool:
    """Keep the result of an orphan (a call that only a pilot knows), or forget the orphan after an infrastructure
    fault. Return False if the call is not an orphan.
    """
    if retries.is_infrastructure_fault(outcome):
        return state.orphans.pop(outcome.call, None) is not None
    if (orphan := state.orphans.get(outcome.call)) is not None:
        orphan.end = outcome
    return orphan is not None


def _order_drop_if_running(manager: Manager, library: Library, id: CallId, *, running: bool) -> None:
    if manager.state.libraries.get(library.id) is library and id in library.withdrawn_calls:
        holding.order_call_drop(manager, library, id, stops_running=running, of_gang=running)


def adopt_library(manager: Manager, pilot: Pilot, facts: LibraryFacts, message: PilotHello) -> bool:
    """Record a library that only the pilot knows. Return False if the manager cannot use it."""
    state = manager.state
    devices = tuple(pilot.devices[id] for id in dict.fromkeys(facts.devices) if id in pilot.devices)
    context = state.contexts.get(facts.recipe)
    if context is None and (recipe := next((x for x in message.recipes if x.key == facts.recipe), None)) is not None:
        context = registry.define_context(manager, recipe)
    taken = facts.library in state.libraries
    if state.end_reason or taken or context is None or not devices or len(devices) != len(facts.devices):
        return False
    library = Library(LibraryId(facts.library), context, pilot, devices, state.now)
    libraries.record_memory_use(library, facts.memory_bytes, facts.device_bytes, now=state.now)
    library.can_sleep, library.awake_bytes = facts.sleeps, facts.awake_bytes
    library.host_bytes = min(facts.host_bytes, max(0, pilot.free_host_bytes_for_sleep))
    try:
        libraries.adopt_found_library(manager, library, reserved_bytes=facts.reserved_bytes, is_loaded=facts.ready)
    except PolicyError:
        return False
    if facts.ready:
        blocks.mark_context_loaded_in_block(manager, pilot)
    state.add_notice(JOURNAL_LOST)
    return True
