"""The pilot's reactor: one function per event, per order of the manager, and per message of a library.

`PilotCore.handle(event, now) -> [Command]` is a pure function. The agent, the simulator and the TaskVine pool execute
its commands in different ways. Each function below calls the core's other modules, which never call this module.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import assert_never

import msgspec

from stoker.connections import join_address
from stoker.pilot.core import events, lifecycle, limits, memory, objects, presence, probes, running, sleeping, starting
from stoker.pilot.core.commands import (
    Command,
    DropAcknowledgedFrames,
    InspectOffer,
    ObserveLibrary,
    OfferSnapshot,
    SendToLibrary,
    Severity,
)
from stoker.pilot.core.running import make_load_failure
from stoker.pilot.core.state import REFUSING_STAGES, SLEEP_STAGES, CoreState, PilotFacts, PilotLibrary, Stage
from stoker.pilot.core.turns import decode_excess_s, refuse_if_late
from stoker.protocol import to_agent, to_manager, to_pilot
from stoker.protocol.calls import FailureKind, RefusalCase
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.protocol.to_library import Evict, MeetRankZero
from stoker.units import show_bytes

# After a hello, the manager repeats these orders if their effect is missing in the hello. Therefore, the pilot ignores
# these orders until the manager has answered the hello.
_REPEATED_ORDERS = (to_pilot.RunCalls, to_pilot.StartLibrary, to_pilot.CancelCalls, to_pilot.MeetGang)


class PilotCore:
    """The core of one pilot. Callers only read `state`."""

    def __init__(self, facts: PilotFacts) -> None:
        self.state = CoreState(facts)

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """Handle an event and return commands. `now` is in seconds and must not decrease."""
        state = self.state
        state.now = now
        handle_event(state, event)
        out, state.commands = state.commands, []
        return out


class EventQueue:
    """Passes events to a core and executes the core's commands."""

    def __init__(
        self, core: PilotCore, execute_command: Callable[[Command], None], *, clock: Callable[[], float]
    ) -> None:
        self._core = core
        self._execute_command = execute_command
        self._clock = clock
        self._events: deque[events.Event] = deque()
        self._is_handling = False

    def handle_event(self, event: events.Event) -> int:
        """Handle an event and the events that its commands cause. Return the number of handled events; 0 if the event
        is queued.
        """
        self._events.append(event)
        if self._is_handling:
            return 0
        self._is_handling, handled = True, 0
        try:
            while self._events:  # an earlier command may have raised an error and left events in the queue
                handled += 1
                for command in self._core.handle(self._events.popleft(), self._clock()):
                    self._execute_command(command)
        finally:
            self._is_handling = False
        return handled


# ---- events
def handle_event(state: CoreState, event: events.Event) -> None:
    match event:
        case events.FromManager(message=message):
            handle_order(state, message)
        case events.FromLibrary():
            handle_library_messages(state, event)
        case events.HelloDue():
            presence.send_hello(state, event)
        case events.ManagerAway():
            presence.leave_if_manager_absent(state, event)
        case events.OfferInspected():
            accept_or_refuse_offer(state, event)
        case events.UsageMeasured():
            presence.send_heartbeat(state, event)
        case events.Tick():
            presence.handle_tick(state, event)
        case events.WalltimeKnown(left_s=left_s):
            presence.record_remaining_walltime(state, left_s)
        case events.SignalReceived():
            presence.handle_termination_signal(state, event)
        case events.Farewell(running=ran):
            presence.report_pilot_end(state, ran)
        case events.ResourceLost(reason=reason, loss=loss):
            state.is_unfit = True
            lifecycle.start_exit(state, reason, within_s=0.0, loss=loss)
        case events.TaskVineEnded(reason=reason):
            lifecycle.start_drain(state, reason, within_s=state.facts.exit_grace_s, code=1)
        case events.ObjectArrived():
            starting.pin_arrived_object(state, event)
        case events.ObjectLost(name=name, lack=lack):
            starting.handle_lost_object(state, name, lack)
        case events.SourceFailed(name=name, reason=reason, peer=peer):
            objects.report_failed_source(state, name, reason, peer)
        case events.CacheListed(sizes=sizes):
            objects.report_cache_changes(state, sizes)
        case events.ResultsUploaded():
            running.report_uploaded_results(state, event)
        case events.SnapshotTaken(here=here):
            state.reported_objects.add(here.object.name)
            state.reported_snapshots.append(here)
            state.tell_manager(here)
        case events.DevicesMeasured():
            limits.apply_device_measurements(state, event)
        case events.DeviceProbed():
            probes.record_probe_verdict(state, event)
        case events.DriverReported():
            probes.record_driver_report(state, event)
        case events.DeviceAway(device=device, reason=reason):
            probes.record_device_absence(state, device, reason)
        case events.TimerFired(key=key):
            handle_timer(state, key)
        case events.LibrariesObserved(libraries=seen):
            for one in seen:
                if (library := state.libraries.get(one.library)) is not None:
                    limits.enforce_limits(state, library, one)
        case events.WasSuspended(seconds=seconds):
            limits.extend_limits(state, seconds)
        case _:
            handle_library_event(state, event)
    if state.ledger.has_freed and state.claims:
        starting.grant_memory_claims(state)
    if state.host_memory.has_freed and state.host_claims:
        sleeping.grant_host_memory_claims(state)


_LibraryEvent = (
    events.LibraryPrepared | events.ProcessMade | events.ProcessEnded | events.LibraryBytesInvalid
    | events.LibrarySocketClosed | events.DevicesWanted | events.ObjectsPinned | events.ArgumentsFetched
)  # fmt: skip


def handle_library_event(state: CoreState, event: _LibraryEvent) -> None:
    library = state.libraries.get(event.library)
    if library is None:
        return
    match event:
        case events.LibraryPrepared():
            starting.check_node_and_fetch_objects(state, library, event)
        case events.ProcessMade(pid=pid):
            library.pid = pid
        case events.ProcessEnded(cause=cause, is_pilots_fault=is_pilots_fault, verdict=verdict):
            if verdict is not None:
                running.set_end_cause(library, verdict)
            if cause:
                running.set_end_cause(
                    library, make_load_failure(state, library, cause, is_pilots_fault=is_pilots_fault)
                )
            lifecycle.release_ended_library(state, library, event)
        case events.LibraryBytesInvalid(reason=reason):
            kill_library_after_invalid_bytes(state, library, reason)
        case events.LibrarySocketClosed():
            library.socket_closed_at = library.socket_closed_at or state.now
        case events.DevicesWanted(reason=reason):
            lifecycle.stop_library(state, library.number, drain=True, reason=reason)
        case events.ObjectsPinned():
            starting.continue_with_pinned_objects(state, library, event)
        case events.ArgumentsFetched():
            running.continue_with_arguments(state, library, event)
        case _:
            assert_never(event)


def handle_timer(state: CoreState, key: str) -> None:
    what, _, number = key.partition("/")
    library = state.libraries.get(LibraryId(int(number)))
    if library is None:
        return
    if what == "snapshots":
        starting.stop_waiting_for_snapshots(state, library)
    elif what == "memory":
        starting.check_memory_claim(state, library)
    elif library.stopping_calls:
        state.commands.append(ObserveLibrary(library.number))


# ---- orders of the manager
def handle_order(state: CoreState, message: to_pilot.ToPilot) -> None:
    if state.answered_hello != state.hellos and isinstance(message, _REPEATED_ORDERS):
        return
    if state.has_ended and not isinstance(message, to_pilot.Ack):
        return
    match message:
        case to_pilot.RunCalls():
            accept_calls(state, message)
        case to_pilot.Ack(sequence=sequence):
            state.commands.append(DropAcknowledgedFrames(sequence))
        case to_pilot.StartLibrary():
            starting.start_library(state, message)
        case to_pilot.StopLibrary(library=number, drain=drain, reason=reason):
            lifecycle.stop_library(state, number, drain=drain, reason=reason)
        case to_pilot.TakeBack(library=number, count=count):
            return_newest_calls(state, number, count)
        case to_pilot.CancelCalls():
            cancel_calls(state, message)
        case to_pilot.EvictCall(library=number, call=call):
            if number in state.libraries:
                state.commands.append(SendToLibrary(number, Evict(call=call)))
        case to_pilot.MeetGang(library=number, call=call, address=address):
            if number in state.libraries:
                state.commands.append(SendToLibrary(number, MeetRankZero(call=call, address=address)))
        case to_pilot.AckPieces():
            running.drop_acknowledged_pieces(state, message)
        case to_pilot.ResizeLibrary(library=number, device_memory_bytes=size):
            memory.resize_library(state, number, size)
        case to_pilot.SleepLibrary():
            sleeping.sleep_library(state, message)
        case to_pilot.WakeLibrary():
            sleeping.wake_library(state, message)
        case to_pilot.PilotWelcome():
            handle_welcome(state, message)
        case to_pilot.HelloAgain(acknowledged=acknowledged):
            state.commands.append(DropAcknowledgedFrames(acknowledged))
            state.hello_is_due = True
        case to_pilot.FetchObject():
            nowhere = objects.apply_sources(state, message)
            if nowhere is not None:
                what = f"the object {nowhere.ref.name} is unavailable: no pilot that has it can be reached"
                starting.handle_lost_object(state, nowhere.ref.name, events.FetchFailure(nowhere.trouble or what))
        case to_pilot.PilotRefused(reason=reason):
            state.says_farewell = False
            lifecycle.start_exit(state, f"the manager refused this pilot: {reason}", within_s=0.0, code=3)
        case to_pilot.Exit(reason=reason, drain=drain, hand_on_s=hand_on_s):
            state.hands_on_until = state.now + hand_on_s
            lifecycle.start_drain(state, reason, within_s=float("inf") if drain else 0.0)
        case _:
            assert_never(message)


def accept_calls(state: CoreState, order: to_pilot.RunCalls, *, is_inspected: bool = False) -> None:
    """Send a library its new calls. If the library has ended, return the calls to the manager."""
    library = state.libraries.get(order.library)
    refused = ""
    if library is None:
        refused = f"lib-{order.library} is not on this pilot"
    elif library.must_end or library.stage in REFUSING_STAGES:
        state_of = "about to end" if library.stage not in SLEEP_STAGES else library.stage.value
        refused = f"lib-{order.library} is {state_of}"
    elif state.leaving:
        refused = f"the pilot is leaving: {state.leaving}"
    if library is None or refused:
        calls, case = tuple([spec.call for spec in order.calls]), RefusalCase.ENDS if order.offer else None
        state.tell_manager(to_manager.CallsReturned(order.library, calls, refused=refused, case=case))
        return
    held = library.held_calls
    if held and any(spec.call in held for spec in order.calls):
        order = msgspec.structs.replace(order, calls=[spec for spec in order.calls if spec.call not in held])
        if not order.calls:
            return
    if order.offer and not is_inspected:
        state.commands.append(InspectOffer(order))
        return
    options = order.options
    running.hold_calls(library, [spec.call for spec in order.calls], limit_s=options.limit_s, streams=options.stream)
    if library.stage is Stage.READY:
        running.send_calls_to_process(state, library, order)
    else:
        running.postpone_order(library, order)


def accept_or_refuse_offer(state: CoreState, event: events.OfferInspected) -> None:
    """Accept an offered call, or refuse it if memory is missing or a request would be late (SLINFER §VI-C).

    Both checks ignore the libraries that the call preempts. The manager ends these libraries after `OfferAccepted`.
    """
    order = event.order
    library = state.libraries.get(order.library)
    if library is None or library.must_end or library.stage in REFUSING_STAGES or state.leaving:
        accept_calls(state, order, is_inspected=True)
        return
    coming = library.unconfirmed_sizes[-1] if library.unconfirmed_sizes else memory.planned_bytes(state, library)
    grows = order.reserve_bytes > coming
    refused, case, required, over = "", RefusalCase.MEMORY, 0, 0.0
    leaving = frozenset(number for number in order.preempts if number in state.libraries)
    gone = leaving.union(LibraryId(-1 - number) for number in leaving)  # plus their additional engines
    engines = [engine for engine in event.engines if engine.library not in gone]
    if library.number in state.claims:
        refused = f"lib-{library.number} waits for memory on its devices"
    elif event.why_full:
        refused = event.why_full
    elif event.required_bytes > max(order.reserve_bytes, coming):
        required = event.required_bytes
        refused = f"lib-{library.number} needs {show_bytes(required)} of device memory for the call"
    elif grows and not memory.can_grow_to(state, library, order.reserve_bytes, ending=leaving):
        refused = f"lib-{library.number} would wait for memory on its devices"
    elif event.new is not None:
        late = refuse_if_late(engines, library.number, event.new, now=state.now, free_at=event.free_at)
        if late is not None:
            case, refused = late
            over = decode_excess_s(engines, library.number, event.new)
    if not refused:
        if order.preempts:
            [spec] = order.calls
            state.tell_manager(to_manager.OfferAccepted(library.number, spec.call, order.preempts, order.reserve_bytes))
        if grows:
            memory.resize_library(state, library.number, order.reserve_bytes)
        accept_calls(state, order, is_inspected=True)
        return
    if order.reserve_bytes and not order.preempts:
        memory.report_unchanged_size(state, library, ordered_bytes=order.reserve_bytes)
    returned = to_manager.CallsReturned(
        library.number, tuple(spec.call for spec in order.calls), refused=refused, required_bytes=required, over_s=over,
        case=case,
    )  # fmt: skip
    state.tell_manager(returned)


def return_newest_calls(state: CoreState, number: LibraryId, count: int) -> None:
    library = state.libraries.get(number)
    if library is not None and library.is_serving:
        state.commands.append(SendToLibrary(number, running.make_give_back_order(library, count=count)))
        library.give_back_sent_at = library.give_back_sent_at or state.now
    elif library is not None:
        state.tell_manager(to_manager.CallsReturned(number, tuple(running.remove_newest_waiting_calls(library, count))))


def cancel_calls(state: CoreState, order: to_pilot.CancelCalls) -> None:
    """Drop the waiting calls of the order. If `order.running` is true, also stop its running calls."""
    library = state.libraries.get(order.library)
    if library is None:
        return
    held = library.held_calls
    # Send no second answer for calls that have left the library: the library may get them again before the answer
    # arrives.
    dropped = running.remove_waiting_calls(library, held.keys() & order.calls)
    if dropped:
        state.tell_manager(to_manager.CallsReturned(order.library, tuple(dropped)))
    rest = tuple(call for call in order.calls if call in held)
    if not rest or not library.is_serving:
        return
    state.commands.append(SendToLibrary(library.number, running.make_give_back_order(library, calls=rest)))
    if order.running:
        lifecycle.stop_calls(state, library, rest, least_s=order.grace_s, failure=None)
        return
    for call in rest:  # evict a call that yields pieces, because no client reads them; other calls may finish
        if call in library.piece_windows:
            state.commands.append(SendToLibrary(library.number, Evict(call=call)))


def handle_welcome(state: CoreState, message: to_pilot.PilotWelcome) -> None:
    """Resend messages that the manager may have missed."""
    state.answered_hello = message.hello or state.hellos
    state.heartbeat_s, state.lease_s = max(0.1, message.heartbeat_s), message.lease_s
    state.welcomed_at = state.now
    state.heartbeat_at = 0.0  # send a heartbeat now, which reports the usage of libraries
    objects.request_objects_again(state)
    running.resend_pieces(state)
    for here in state.reported_snapshots if message.again else ():
        state.tell_manager(here)


# ---- messages of libraries
def handle_library_messages(state: CoreState, event: events.FromLibrary) -> None:
    library = state.libraries.get(event.library)
    if library is None:
        return
    library.idle_observations = 0
    try:
        for message in event.messages:
            handle_library_message(state, library, message)
    except Exception as error:
        state.write_log(f"lib-{library.number}: a message cannot be handled\n{traceback.format_exc()}", Severity.ERROR)
        kill_library_after_invalid_bytes(state, library, f"{type(error).__name__}: {error}")


def handle_library_message(state: CoreState, library: PilotLibrary, message: to_agent.ToAgent) -> None:
    number = library.number
    match message:
        case to_agent.RunsEnded(ends=ends):
            running.report_ended_calls(state, library, ends)
        case to_agent.GivenBack(order=order) if 0 < order <= library.last_void_give_back:
            pass  # ignore this answer: its calls may have been sent to the library again
        case to_agent.GivenBack(calls=calls, need_function=need):
            library.give_back_sent_at = 0.0
            back = tuple(running.remove_calls(library, calls))
            state.tell_manager(to_manager.CallsReturned(number, back, need_function=need))
        case to_agent.Reports(reports=reports):
            state.tell_manager(to_manager.CallsProgress(number, reports))
        case to_agent.Yielded():
            running.keep_and_send_pieces(state, library, message)
        case to_agent.RunEvicted(progress=progress):
            running.report_evicted_call(state, library, progress)
        case to_agent.RankZeroListens(call=call, port=port):
            state.tell_manager(to_manager.GangMeets(number, call, join_address(state.facts.address, port)))
        case to_agent.Hello(pid=pid):
            library.pid = pid
            library.hello_at = state.now
            if library.stage is Stage.STARTING:
                lifecycle.change_stage(library, Stage.LOADING)
                state.tell_manager(to_manager.LibraryUpdate(number, to_manager.LibraryPhase.LOADING))
        case to_agent.Loaded():
            handle_loaded_context(state, library, message)
        case to_agent.LoadFailed(failure=failure) | to_agent.SleepFailed(failure=failure):
            running.set_end_cause(library, failure)
        case to_agent.SnapshotMade(form=form):
            if form not in state.offered_forms:
                state.offered_forms.add(form)
                state.commands.append(OfferSnapshot(RecipeKey(library.recipe.key), message))
        case to_agent.BatchReport(load=load, times=times):
            starting.learn_step_times(state, library, times)
            state.tell_manager(to_manager.LibraryEngineReport(number, load, times))
        case to_agent.Slept():
            sleeping.record_sleep(state, library, message)
        case to_agent.Woke():
            sleeping.record_wake(state, library, message)
        case to_agent.Resized():
            memory.record_library_resize(state, library, message)
        case _:
            assert_never(message)


def handle_loaded_context(state: CoreState, library: PilotLibrary, message: to_agent.Loaded) -> None:
    if library.stage is not Stage.LOADING:
        return
    lifecycle.change_stage(library, Stage.READY)
    library.resident_bytes, library.ready_at = message.resident_bytes, state.now
    library.slots, library.cache, library.sleeps = message.slots, message.cache, message.sleeps
    own = state.devices_of(library)[0].process_bytes
    if message.device_bytes:  # `device_bytes` is the memory of torch; CUDA uses more memory for the process
        library.device_bytes = max(library.device_bytes, message.device_bytes + own)
    ready = to_manager.LibraryReady(
        library=library.number, load_s=message.load_s, resident_bytes=message.resident_bytes,
        start_s=library.hello_at - library.started_at if message.start_s is None else message.start_s,
        peak_bytes=message.peak_bytes, device_bytes=library.device_bytes,
        fetch_s=library.fetched_at - library.ordered_at if library.has_pins else 0.0,
        slots=library.slots, cache=library.cache, sleeps=library.sleeps,
    )  # fmt: skip
    took = f"{ready.start_s:.3f} s to start, {ready.load_s:.2f} s to load"
    state.write_log(f"lib-{library.number} ({library.recipe.name}) ready: {took}")
    state.tell_manager(ready)
    memory.replace_guessed_reservation(state, library)
    for order in running.take_postponed_orders(library):
        running.send_calls_to_process(state, library, order)


def kill_library_after_invalid_bytes(state: CoreState, library: PilotLibrary, reason: str) -> None:
    library.invalid_bytes_reason = library.invalid_bytes_reason or reason
    what = f"lib-{library.number} wrote invalid bytes to its socket: {library.invalid_bytes_reason}"
    if not library.must_end:
        state.write_log(what, Severity.WARNING)
    lifecycle.fail_library(state, library, FailureKind.DIED, what)
