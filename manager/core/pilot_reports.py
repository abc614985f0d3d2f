"""Process the reports of pilots and libraries: hellos, heartbeats, loaded libraries and ended libraries."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from stoker.manager.core import (
    blame,
    block_orders,
    blocks,
    dispatch,
    gangs,
    holding,
    libraries,
    pilots,
    queues,
    retries,
)
from stoker.manager.core.ending import record_runs
from stoker.manager.core.events import ContextAdvice, FromPilot, RecordLoad, ToPilot
from stoker.manager.core.manager import Manager
from stoker.manager.core.nodes import check_devices_after_test
from stoker.manager.core.nouns import Call, CallState, Context, Device, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.state import State
from stoker.protocol import bounds, to_manager, to_pilot
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import CallId, DeviceId, PilotId, RecipeKey
from stoker.protocol.to_pilot import CancelCalls, Exit, ResizeLibrary, StopLibrary
from stoker.protocol.wire import explain_mismatch

COUNTED_AS_LOST = "the manager counted this pilot as lost, and its calls run elsewhere"
MAX_HELLO_REQUESTS = 4  # Maximum number of requests in a row for a hello that is newer than the processed frames


def why_hello_is_refused(state: State, id: PilotId, message: to_manager.PilotHello) -> str:
    if wrong := explain_mismatch(message, session=state.session) or bounds.describe_invalid_message(message):
        return wrong
    if state.end_reason:
        return f"the session is over: {state.end_reason}"
    if banned := state.ban_reasons.get(id, ""):
        return banned
    gone = state.gone_pilots.get(id)
    return COUNTED_AS_LOST if gone is not None and gone.restorable_libraries is None else ""


def answer_unknown_pilot(manager: Manager, id: PilotId) -> None:
    manager.state.count_refusal("frame of an unknown pilot")
    gone = manager.state.gone_pilots.get(id)
    if gone is not None:
        back = gone.restorable_libraries is not None
        manager.commands.append(ToPilot(id, to_pilot.HelloAgain() if back else to_pilot.PilotRefused(COUNTED_AS_LOST)))


def reject_invalid_pilot(manager: Manager, pilot: Pilot, wrong: str) -> None:
    manager.state.count_refusal("message of a pilot with an invalid value")
    manager.send_to_pilot(pilot, to_pilot.PilotRefused(wrong))
    pilots.remove_ended_pilot(manager, pilot.id, f"it sent an invalid value: {wrong}", may_return=False)


def request_newer_hello(manager: Manager, pilot: Pilot, message: to_manager.PilotHello) -> bool:
    """If the hello is older than frames that the manager has processed, request a newer hello and return True."""
    inbox = pilot.inbox
    is_old = (
        pilot.hello_requests < MAX_HELLO_REQUESTS
        and not inbox.lost_handled_frames
        and message.acknowledged < inbox.last
    )
    pilot.hello_requests = pilot.hello_requests + 1 if is_old else 0
    if is_old:
        manager.commands.append(ToPilot(pilot.id, to_pilot.HelloAgain(inbox.last)))
    return is_old


def add_joining_pilot(manager: Manager, id: PilotId, message: to_manager.PilotHello) -> Pilot:
    now = manager.state.now
    pilot = Pilot(id, host=message.host, pid=message.pid, block=message.block, folder=message.folder, now=now)
    manager.state.pilots[id] = pilot
    for facts in message.devices:
        pilot.devices[facts.device] = Device(pilot, facts, now)
    pilot.troubles, pilot.lacks = message.troubles, message.lacks
    pilot.node, pilot.sleeper_bytes = message.node, message.sleeper_bytes
    said = [*message.troubles, *(f"{facts.device}: {facts.fault}" for facts in message.devices if facts.fault)]
    pilot.note(now, *dict.fromkeys(said))
    block_orders.add_pilot_to_block(manager, pilot)
    return pilot


def restore_returned_pilot(manager: Manager, pilot: Pilot, message: to_manager.PilotHello) -> Pilot:
    pilots.restore_pilot_record(manager, pilot)
    blocks.uncount_pilot_loss(manager, pilot)
    block_orders.add_pilot_to_block(manager, pilot, has_returned=True)
    pilot.note(manager.state.now, "reconnected after it was counted as lost")
    libraries.restore_returned_libraries(manager, pilot, message.libraries)
    return pilot


_RESUME_ORDER = {LibraryState.STOPPING: 0, LibraryState.ASLEEP: 1}


def reconcile_pilot_with_hello(manager: Manager, pilot: Pilot, message: to_manager.PilotHello) -> None:
    there = {facts.library: facts for facts in message.libraries}
    for library in list(pilot.libraries.values()):
        if library.id not in there or there[library.id].recipe != library.context.recipe.key:
            libraries.remove_lost_library(manager, library, reason="it reconnected without the library")
    for id, facts in there.items():
        if id not in pilot.libraries and not pilots.adopt_library(manager, pilot, facts, message):
            manager.send_to_pilot(pilot, StopLibrary(id, "the manager does not know it"))
    libraries_here = list(pilot.libraries.values())
    missing: dict[Call, Library] = {}  # Calls that never reached their libraries. A gang call is requeued only once
    for library in libraries_here:
        for call in holding.remove_unlisted_calls(library, set(there[library.id].calls)):
            missing.setdefault(call, library)
    for call, library in missing.items():
        holding.requeue_calls(manager, (call,), why=f"the call never reached lib-{library.id}: back in the queue")
    for library in libraries_here:
        _reconcile_library(manager, library, there[library.id])
    # A gang call may start on several libraries, so the loop above first compares all libraries with the hello.
    # Libraries that free memory come first here, because the others may need this memory.
    for library in sorted(libraries_here, key=lambda x: _RESUME_ORDER.get(x.state, len(_RESUME_ORDER))):
        if pilot.libraries.get(library.id) is library:
            _resume_library_after_hello(manager, library, there[library.id])
    if pilot.state is PilotState.DRAINING:
        manager.send_to_pilot(pilot, Exit("the manager drains this pilot", drain=True))


def _handle_unknown_call(manager: Manager, library: Library, id: CallId) -> None:
    call = manager.state.calls.get(id)
    if call is None:
        if pilots.is_unsubmitted_call_id(manager.state, id):
            pilots.record_orphan_call(manager, library, id)
        else:
            holding.order_call_drop(manager, library, id, stops_running=False)
    elif call.state is CallState.WAITING and holding.can_continue_call(library, call):
        queues.remove_call_from_queue(manager, call)
        holding.resume_call(manager, library, call, why="the call has kept running there and continues")
    else:  # the call runs elsewhere now, or a gang call starts again as a whole
        is_gang = call.group.options.gang[1] > 1
        holding.order_call_drop(manager, library, id, stops_running=is_gang, of_gang=is_gang)


def _reconcile_library(manager: Manager, library: Library, facts: to_manager.LibraryFacts) -> None:
    listed = set(facts.calls)
    unknown = [id for id in facts.calls if id not in library.held and id not in library.withdrawn_calls]
    holding.free_unlisted_slots(library, listed)
    library.functions.clear()
    libraries.set_library_slots(library, facts.slots)
    if facts.cache is not None:
        known = library.context.advice.get(library.kind, ContextAdvice())
        library.context.advice[library.kind] = msgspec.structs.replace(known, cache=facts.cache)
    orphans = manager.state.orphans
    for running in (False, True):
        again = tuple(
            CallId(id) for id, flag in library.withdrawn_calls.items() if flag is running and id not in orphans
        )
        if again:
            manager.send_to_pilot(library.pilot, CancelCalls(library.id, again, running))
    for id in unknown:
        _handle_unknown_call(manager, library, id)
    gangs.resend_rank0_address(manager, library)
    if library.unanswered_resizes:
        manager.send_to_pilot(library.pilot, ResizeLibrary(library.id, library.unanswered_resizes[-1]))
        del library.unanswered_resizes[:-1]
    queues.update_load_index(manager, library)


def _resume_library_after_hello(manager: Manager, library: Library, facts: to_manager.LibraryFacts) -> None:
    if library.state is LibraryState.STOPPING:
        manager.send_to_pilot(library.pilot, StopLibrary(library.id, "the manager ordered it to stop"))
    elif library.is_waking and library.held and not facts.asleep:  # the journal lost the library's wake report
        library.host_bytes = 0
        _start_serving(manager, library)
    elif libraries.repeat_sleep_or_wake_order(manager, library, facts):
        return
    elif library.state is LibraryState.LOADING and facts.ready:
        _handle_loaded_library(manager, library)
    else:
        dispatch.send_queued_calls_to_library(manager, library)


def handle_hello_device_faults(
    manager: Manager, pilot: Pilot, faults: Mapping[DeviceId, str], *, may_lack_reports: bool
) -> None:
    """Record the device faults of a hello. `may_lack_reports`: the journal may have lost reports about devices."""
    for device in list(pilot.devices.values()):
        fault = faults.get(device.id, device.facts.fault if may_lack_reports else device.reported)
        pilots.record_device_health(manager, device, fault)


def handle_device_fault(manager: Manager, pilot: Pilot, message: to_manager.DeviceFault) -> None:
    device = pilot.devices.get(DeviceId(message.device))
    if device is None:
        manager.state.count_refusal("fault of a device that the pilot does not have")
    else:
        pilots.record_device_health(manager, device, message.reason)
        check_devices_after_test(manager, pilot)


_CHANGE_DIVISOR = 16  # A memory measurement is recorded if it differs from the last one by at least 1/16
_MIN_CHANGE_BYTES = 16 << 20  # A memory measurement is recorded only if it differs from the last one by this many bytes
RUN_TIME_RECORD_INTERVAL_S = 5.0  # Minimum seconds between two records of run times


def is_heartbeat(event: FromPilot) -> bool:
    return not event.sequence and len(event.messages) == 1 and type(event.messages[0]) is to_manager.Heartbeat


def needs_heartbeat_record(state: State, event: FromPilot, now: float) -> bool:
    """Return True if a heartbeat must be in the journal: its values have changed, or run times must be recorded."""
    pilot, message = state.pilots.get(event.pilot), event.messages[0]
    if pilot is None or type(message) is not to_manager.Heartbeat:
        return False
    if state.unrecorded_costs and now - state.runs_recorded_at >= RUN_TIME_RECORD_INTERVAL_S:
        return True
    if message.refused_frames != pilot.refused_frames or _has_memory_changed(pilot.cache_bytes, message.cache_bytes):
        return True
    uses = ((pilot.libraries.get(use.library), use) for use in message.libraries)
    return any(
        _has_memory_changed(library.memory_bytes, use.memory_bytes)
        or _has_memory_changed(library.device_bytes, use.device_bytes)
        for library, use in uses
        if library is not None
    )


def _has_memory_changed(before: int, after: int) -> bool:
    return before != after and abs(after - before) >= max(_MIN_CHANGE_BYTES, before // _CHANGE_DIVISOR)


def handle_heartbeat(manager: Manager, pilot: Pilot, message: to_manager.Heartbeat) -> None:
    pilot.cache_bytes, pilot.refused_frames = message.cache_bytes, message.refused_frames
    for use in message.libraries:
        library = pilot.libraries.get(use.library)
        if library is not None:
            libraries.record_memory_use(library, use.memory_bytes, use.device_bytes, now=manager.state.now)
    record_runs(manager)


# If a library ended with one of these failures, none of its remaining calls counts as the cause.
FAILURES_THAT_BLAME_NO_CALL = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT, FailureKind.PILOT})

# If a library ended with one of these failures, the cause is a call that the manager has already withdrawn from it.
FAILURES_BY_A_WITHDRAWN_CALL = frozenset({FailureKind.CANCELLED, FailureKind.TIMEOUT})


def handle_ready_library(manager: Manager, library: Library, message: to_manager.LibraryReady) -> None:
    state, context = manager.state, library.context
    if library.state is not LibraryState.LOADING:
        if library.state is not LibraryState.STOPPING:
            state.count_refusal("library ready twice")
        return
    libraries.record_memory_use(library, message.resident_bytes, message.device_bytes, now=state.now)
    libraries.set_library_slots(library, message.slots)
    library.can_sleep = message.sleeps
    at_once = f", runs {message.slots} calls at once" if message.slots else ""
    if message.cache is not None and message.cache.is_fixed:
        at_once += f"; its cache of {message.cache.tokens:,} tokens cannot be resized"
    library.note(state.now, f"ready: {message.start_s:.2f} s to start, {message.load_s:.2f} s to load{at_once}")
    libraries.record_load(library, message)
    record = RecordLoad(
        RecipeKey(context.recipe.key), context.recipe.name, library.kind, message.start_s, message.load_s,
        message.resident_bytes, message.peak_bytes, message.device_bytes, message.slots,
    )  # fmt: skip
    manager.commands.append(record)
    _handle_loaded_library(manager, library)


def _handle_loaded_library(manager: Manager, library: Library) -> None:
    wanted = manager.policies.residency.reservation_after_load(manager.state, library)
    if wanted < library.promised_bytes:  # the recipe declares no size, so promise only the measured bytes
        manager.supply_changed = True
        libraries.promise_memory(library, wanted)
    _start_serving(manager, library)


def handle_awake_library(manager: Manager, library: Library, message: to_manager.LibraryAwake) -> None:
    if libraries.record_library_awake(manager, library, message):
        _start_serving(manager, library)


def _start_serving(manager: Manager, library: Library) -> None:
    context = library.context
    libraries.mark_library_ready(manager, library)
    blocks.mark_context_loaded_in_block(manager, library.pilot)
    manager.mark_changed("libraries", library.id)
    queues.update_load_index(manager, library)
    holding.mark_set_aside_calls_due(manager, context)
    dispatch.send_queued_calls_to_library(manager, library)


def handle_ended_library(manager: Manager, library: Library, message: to_manager.LibraryGone) -> None:
    """Requeue the calls of a library that has ended, or fail the calls that killed the library."""
    state, context, failure = manager.state, library.context, message.failure
    running = {id for id in message.running if id in library.held}
    broken = holding.pop_broken_gang_calls(state, library, message.running)
    unasked = library.state is LibraryState.LOADING and message.loading and failure is None
    moves = library.state is LibraryState.ASLEEP or library.is_waking
    if moves and failure is not None and failure.kind is FailureKind.CONTEXT:
        context.sleep_failure = failure.message
    survivors = libraries.detach_library(manager, library)
    library.note(state.now, f"ended: {failure.message}" if failure is not None else "ended")
    why = f"back in the queue: lib-{library.id} on {library.pilot.id} ended"
    blamed = crowding = None
    if failure is not None and not message.loading:
        blamed = failure if failure.kind not in FAILURES_THAT_BLAME_NO_CALL else None
        # This failure means that the operating system killed the library because other processes use the memory.
        crowding = failure if failure.kind is FailureKind.PILOT and failure.signal else None
    back = []
    if failure is None and not message.loading:
        retries.record_walltime_cuts(manager, library, [call for call in survivors if call.id in running])
    for call in survivors:
        has_ended, ran = False, call.id in running
        if ran and crowding is not None:
            has_ended = _handle_memory_killed_call(manager, library, call, crowding)
        elif ran and blamed is not None:
            has_ended = retries.blame_call_for_library_death(
                manager, library, call, blamed, was_alone=len(running) == 1
            )
        elif ran and failure is not None and failure.kind in FAILURES_BY_A_WITHDRAWN_CALL:
            retries.record_library_ended_by_other_call(manager, library, call, failure)
        if not has_ended:
            back.append(call)
    for call in broken:
        if blamed is not None:
            retries.blame_call_for_library_death(manager, library, call, blamed, was_alone=len(message.running) == 1)
        elif crowding is not None:
            gangs.count_memory_killed_rank(manager, library, call, crowding)
    holding.requeue_calls(manager, back, why=f"{why} ({failure.message})" if failure else why)
    if failure is None:
        state.rerun_calls += sum(call.id in running for call in back)
    if failure is not None and failure.kind is FailureKind.PILOT:
        context.last_failure = failure
        again_s = 0.0
        if message.cache_lacks_bytes > 0:
            again_s = _make_cache_room(manager, library.pilot, context, message.cache_lacks_bytes)
        blame.mark_pilot_unfit(state, library, failure, was_loading=message.loading, retry_in_s=again_s)
        manager.mark_changed("contexts", context.recipe.key)
    elif message.loading and failure is not None:
        _handle_failed_load(manager, context, library, failure)
        blame.ask_why_load_failed(manager, library, failure)
    if unasked:
        pilots.drain_exiting_pilot(manager, library.pilot)


def _handle_memory_killed_call(manager: Manager, library: Library, call: Call, failure: Failure) -> bool:
    """Handle a call whose library was killed because other processes used the memory. Return False if the caller must
    requeue the call.
    """
    if call.group.options.gang[1] > 1:
        return gangs.count_memory_killed_rank(manager, library, call, failure)
    evidence = msgspec.structs.replace(failure, kind=FailureKind.INFRASTRUCTURE)
    retries.requeue_after_fault(manager, library, call, CallEnd(call.id, False, failure=evidence))
    return True


_STATES_THAT_MAY_SERVE = (LibraryState.LOADING, LibraryState.READY, LibraryState.ASLEEP)


def _handle_failed_load(manager: Manager, context: Context, library: Library, failure: Failure) -> None:
    is_over = libraries.record_failed_load(library, failure)
    manager.mark_changed("contexts", context.recipe.key)
    if not is_over:
        return
    lost = [
        each
        for each in (context, *context.variant_of.values())
        if each.queue.count
        and all(map(libraries.has_too_many_failed_loads, (each, *each.variants.values())))
        and not any(x.state in _STATES_THAT_MAY_SERVE for x in queues.libraries_serving_context(each))
    ]
    text = f"context {context.recipe.name} could not be loaded: {failure.message}"
    evidence = msgspec.structs.replace(failure, kind=FailureKind.CONTEXT, message=text, device="", printed=None)
    for each in lost:
        libraries.fail_waiting_calls(manager, each, evidence)


FILES_FREED_AFTER_S = 2.0  # Seconds after which a stopping library has usually freed its files
RETRY_WHILE_FILES_USED_S = 10.0  # Seconds until the next try to load a context while busy libraries fill the cache


def _make_cache_room(manager: Manager, pilot: Pilot, context: Context, lacks_bytes: int) -> float:
    """Stop idle libraries, least recently used first, to free space in the cache of a pilot. Return the seconds until
    the next attempt to load the context; 0 if the space would not suffice.
    """
    users: dict[Context, list[Library]] = {}
    for library in _libraries_using_object_cache(manager.state, pilot):
        if library.context is not context:
            users.setdefault(library.context, []).append(library)
    coming = {ref.name for ref in context.recipe.objects}
    refs = manager.state.transfers.objects_of_recipe
    objects_of = {other: {ref.name: ref.size_bytes for ref in refs(other.recipe)} for other in users}

    def count_freed_bytes(ending: Collection[Context]) -> int:
        used = coming.union(*(objects_of[other] for other in users if other not in ending))
        free = {name: size for other in ending for name, size in objects_of[other].items() if name not in used}
        return sum(free.values())

    if count_freed_bytes(users) < lacks_bytes:
        return 0.0
    ending = [other for other, those in users.items() if all(map(_is_idle, those))]
    if count_freed_bytes(ending) < lacks_bytes:
        return RETRY_WHILE_FILES_USED_S
    ending.sort(key=lambda other: max(library.used_at for library in users[other]), reverse=True)
    for other in tuple(ending):  # do not stop libraries whose space is not needed
        rest = [each for each in ending if each is not other]
        if count_freed_bytes(rest) >= lacks_bytes:
            ending = rest
    for other in ending:
        for library in users[other]:
            reason = f"its files are removed from the object cache for {context.recipe.name}"
            libraries.stop_library(manager, library, reason=reason)
    return FILES_FREED_AFTER_S


def _libraries_using_object_cache(state: State, pilot: Pilot) -> Iterator[Library]:
    peer = state.transfers.peers.get(pilot.id)
    near = state.transfers.caches.get(peer.cache, {}) if peer is not None else {}
    for id in {pilot.id: None, **dict.fromkeys(near)}:
        for library in state.pilots[id].libraries.values():
            if library.context.recipe.objects and library.state is not LibraryState.GONE:
                yield library


def _is_idle(library: Library) -> bool:
    is_free = library.state in (LibraryState.READY, LibraryState.ASLEEP) and not library.load
    return library.state is LibraryState.STOPPING or (is_free and not library.context.queue.count)
