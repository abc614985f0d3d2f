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
    Observe,
    OfferSnapshot,
    SendToLibrary,
    Severity,
)
from stoker.pilot.core.running import make_load_failure
from stoker.pilot.core.state import REFUSES, SLEEPS, CoreState, PilotFacts, PilotLibrary, Stage
from stoker.pilot.core.turns import decode_excess_s, why_late
from stoker.protocol import to_agent, to_manager, to_pilot
from stoker.protocol.calls import FailureKind, RefusalCase
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.protocol.to_library import Evict, Meet
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
        react(state, event)
        out, state.out = state.out, []
        return out


class EventQueue:
    """Passes events to a core and executes the core's commands."""

    def __init__(self, core: PilotCore, carry_out: Callable[[Command], None], *, clock: Callable[[], float]) -> None:
        self._core = core
        self._carry_out = carry_out
        self._clock = clock
        self._events: deque[events.Event] = deque()
        self._is_handling = False

    def handle(self, event: events.Event) -> int:
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
                    self._carry_out(command)
        finally:
            self._is_handling = False
        return handled


# ---- events
def react(state: CoreState, event: events.Event) -> None:
    match event:
        case events.FromManager(message=message):
            on_order(state, message)
        case events.FromLibrary():
            on_library_messages(state, event)
        case events.HelloDue():
            presence.greet(state, event)
        case events.ManagerAway():
            presence.leave_if_manager_absent(state, event)
        case events.OfferInspected():
            on_offer_inspected(state, event)
        case events.UsageMeasured():
            presence.send_heartbeat(state, event)
        case events.Tick():
            presence.on_tick(state, event)
        case events.WalltimeKnown(left_s=left_s):
            presence.record_remaining_walltime(state, left_s)
        case events.SignalReceived():
            presence.handle_termination_signal(state, event)
        case events.Farewell(running=ran):
            presence.farewell(state, ran)
        case events.ResourceLost(reason=reason, loss=loss):
            state.is_unfit = True
            lifecycle.leave(state, reason, within_s=0.0, loss=loss)
        case events.TaskVineEnded(reason=reason):
            lifecycle.drain(state, reason, within_s=state.facts.exit_grace_s, code=1)
        case events.ObjectArrived():
            starting.object_arrived(state, event)
        case events.ObjectLost(name=name, lack=lack):
            starting.on_object_lost(state, name, lack)
        case events.SourceFailed(name=name, reason=reason, peer=peer):
            objects.report_failed_source(state, name, reason, peer)
        case events.CacheListed(sizes=sizes):
            objects.report_cache_changes(state, sizes)
        case events.ResultsUploaded():
            running.on_results_uploaded(state, event)
        case events.SnapshotTaken(here=here):
            state.told.add(here.object.name)
            state.told_snapshots.append(here)
            state.tell(here)
        case events.DevicesMeasured():
            limits.apply_device_measurements(state, event)
        case events.Probed():
            probes.probed(state, event)
        case events.DriverReported():
            probes.record_driver_report(state, event)
        case events.DeviceAway(device=device, reason=reason):
            probes.record_device_absence(state, device, reason)
        case events.TimerFired(key=key):
            on_timer(state, key)
        case events.Observed(libraries=seen):
            for one in seen:
                if (library := state.libraries.get(one.library)) is not None:
                    limits.enforce_limits(state, library, one)
        case events.WasSuspended(seconds=seconds):
            limits.extend_limits(state, seconds)
        case _:
            on_library_event(state, event)
    if state.ledger.has_freed and state.claims:
        starting.grant_memory_claims(state)
    if state.host.has_freed and state.host_claims:
        sleeping.grant_host_memory_claims(state)


_LibraryEvent = (
    events.LibraryPrepared | events.ProcessMade | events.ProcessEnded | events.LibraryBytesInvalid
    | events.LibrarySocketClosed | events.DevicesWanted | events.Pinned | events.ArgumentsFetched
)  # fmt: skip


def on_library_event(state: CoreState, event: _LibraryEvent) -> None:
    library = state.libraries.get(event.library)
    if library is None:
        return
    match event:
        case events.LibraryPrepared():
            starting.on_library_prepared(state, library, event)
        case events.ProcessMade(pid=pid):
            library.pid = pid
        case events.ProcessEnded(cause=cause, is_pilots_fault=is_pilots_fault, verdict=verdict):
            if verdict is not None:
                running.blame(library, verdict)
            if cause:
                running.blame(library, make_load_failure(state, library, cause, is_pilots_fault=is_pilots_fault))
            lifecycle.release_ended_library(state, library, event)
        case events.LibraryBytesInvalid(reason=reason):
            kill_garbled_library(state, library, reason)
        case events.LibrarySocketClosed():
            library.hung_up_at = library.hung_up_at or state.now
        case events.DevicesWanted(reason=reason):
            lifecycle.stop_library(state, library.number, drain=True, reason=reason)
        case events.Pinned():
            starting.on_objects_pinned(state, library, event)
        case events.ArgumentsFetched():
            running.on_arguments_fetched(state, library, event)
        case _:
            assert_never(event)


def on_timer(state: CoreState, key: str) -> None:
    what, _, number = key.partition("/")
    library = state.libraries.get(LibraryId(int(number)))
    if library is None:
        return
    if what == "snapshots":
        starting.stop_waiting_for_snapshots(state, library)
    elif what == "memory":
        starting.check_memory_claim(state, library)
    elif library.stopping:
        state.out.append(Observe(library.number))


# ---- orders of the manager
def on_order(state: CoreState, message: to_pilot.ToPilot) -> None:
    if state.answered != state.hellos and isinstance(message, _REPEATED_ORDERS):
        return
    if state.has_ended and not isinstance(message, to_pilot.Ack):
        return
    match message:
        case to_pilot.RunCalls():
            on_run_calls(state, message)
        case to_pilot.Ack(sequence=sequence):
            state.out.append(DropAcknowledgedFrames(sequence))
        case to_pilot.StartLibrary():
            starting.start_library(state, message)
        case to_pilot.StopLibrary(library=number, drain=drain, reason=reason):
            lifecycle.stop_library(state, number, drain=drain, reason=reason)
        case to_pilot.TakeBack(library=number, count=count):
            on_take_back(state, number, count)
        case to_pilot.CancelCalls():
            on_cancel(state, message)
        case to_pilot.EvictCall(library=number, call=call):
            if number in state.libraries:
                state.out.append(SendToLibrary(number, Evict(call=call)))
        case to_pilot.MeetGang(library=number, call=call, address=address):
            if number in state.libraries:
                state.out.append(SendToLibrary(number, Meet(call=call, address=address)))
        case to_pilot.AckPieces():
            running.on_pieces_acknowledged(state, message)
        case to_pilot.ResizeLibrary(library=number, device_memory_bytes=size):
            memory.resize_library(state, number, size)
        case to_pilot.SleepLibrary():
            sleeping.sleep_library(state, message)
        case to_pilot.WakeLibrary():
            sleeping.wake_library(state, message)
        case to_pilot.PilotWelcome():
            on_welcome(state, message)
        case to_pilot.HelloAgain(acknowledged=acknowledged):
            state.out.append(DropAcknowledgedFrames(acknowledged))
            state.hello_is_due = True
        case to_pilot.FetchObject():
            nowhere = objects.set_sources(state, message)
            if nowhere is not None:
                what = f"the object {nowhere.ref.name} is unavailable: no pilot that has it can be reached"
                starting.on_object_lost(state, nowhere.ref.name, events.FetchFailure(nowhere.trouble or what))
        case to_pilot.PilotRefused(reason=reason):
            state.says_farewell = False
            lifecycle.leave(state, f"the manager refused this pilot: {reason}", within_s=0.0, code=3)
        case to_pilot.Exit(reason=reason, drain=drain, hand_on_s=hand_on_s):
            state.hands_on_until = state.now + hand_on_s
            lifecycle.drain(state, reason, within_s=float("inf") if drain else 0.0)
        case _:
            assert_never(message)


def on_run_calls(state: CoreState, order: to_pilot.RunCalls, *, is_weighed: bool = False) -> None:
    """Send a library its new calls. If the library has ended, return the calls to the manager."""
    library = state.libraries.get(order.library)
    refused = ""
    if library is None:
        refused = f"lib-{order.library} is not on this pilot"
    elif library.told_to_end or library.stage in REFUSES:
        state_of = "about to end" if library.stage not in SLEEPS else library.stage.value
        refused = f"lib-{order.library} is {state_of}"
    elif state.leaving:
        refused = f"the pilot is leaving: {state.leaving}"
    if library is None or refused:
        calls, case = tuple([spec.call for spec in order.calls]), RefusalCase.ENDS if order.offer else None
        state.tell(to_manager.CallsReturned(order.library, calls, refused=refused, case=case))
        return
    held = library.held
    if held and any(spec.call in held for spec in order.calls):
        order = msgspec.structs.replace(order, calls=[spec for spec in order.calls if spec.call not in held])
        if not order.calls:
            return
    if order.offer and not is_weighed:
        state.out.append(InspectOffer(order))
        return
    options = order.options
    running.hold_calls(library, [spec.call for spec in order.calls], limit_s=options.limit_s, streams=options.stream)
    if library.stage is Stage.READY:
        running.send_calls_to_process(state, library, order)
    else:
        running.postpone_order(library, order)


def on_offer_inspected(state: CoreState, event: events.OfferInspected) -> None:
    """Accept an offered call, or refuse it if memory is missing or a request would be late (SLINFER §VI-C).

    Both checks ignore the libraries that the call preempts. The manager ends these libraries after `OfferAccepted`.
    """
    order = event.order
    library = state.libraries.get(order.library)
    if library is None or library.told_to_end or library.stage in REFUSES or state.leaving:
        on_run_calls(state, order, is_weighed=True)
        return
    coming = library.resizes[-1] if library.resizes else memory.budget_bytes(state, library)
    grows = order.reserve_bytes > coming
    refused, case, required, over = "", RefusalCase.MEMORY, 0, 0.0
    leaving = frozenset(number for number in order.preempts if number in state.libraries)
    gone = leaving.union(LibraryId(-1 - number) for number in leaving)  # plus their other engines (see `offers`)
    engines = [engine for engine in event.engines if engine.library not in gone]
    if library.number in state.claims:
        refused = f"lib-{library.number} waits for memory on its devices"
    elif event.why_full:
        refused = event.why_full
    elif event.required_bytes > max(order.reserve_bytes, coming):
        required = event.required_bytes
        refused = f"lib-{library.number} needs {show_bytes(required)} of device memory for the call"
    elif grows and not memory.has_room(state, library, order.reserve_bytes, leaving=leaving):
        refused = f"lib-{library.number} would wait for memory on its devices"
    elif event.new is not None:
        late = why_late(engines, library.number, event.new, now=state.now, free_at=event.free_at)
        if late is not None:
            case, refused = late
            over = decode_excess_s(engines, library.number, event.new)
    if not refused:
        if order.preempts:
            [spec] = order.calls
            state.tell(to_manager.OfferAccepted(library.number, spec.call, order.preempts, order.reserve_bytes))
        if grows:
            memory.resize_library(state, library.number, order.reserve_bytes)
        on_run_calls(state, order, is_weighed=True)
        return
    if order.reserve_bytes and not order.preempts:
        memory.report_unchanged_size(state, library, ordered_bytes=order.reserve_bytes)
    returned = to_manager.CallsReturned(
        library.number, tuple(spec.call for spec in order.calls), refused=refused, required_bytes=required, over_s=over,
        case=case,
    )  # fmt: skip
    state.tell(returned)


def on_take_back(state: CoreState, number: LibraryId, count: int) -> None:
    library = state.libraries.get(number)
    if library is not None and library.serves:
        state.out.append(SendToLibrary(number, running.give_back(library, count=count)))
        library.asked_back_at = library.asked_back_at or state.now
    elif library is not None:
        state.tell(to_manager.CallsReturned(number, tuple(running.remove_newest_waiting_calls(library, count))))


def on_cancel(state: CoreState, order: to_pilot.CancelCalls) -> None:
    """Drop the waiting calls of the order. If `order.running` is true, also stop its running calls."""
    library = state.libraries.get(order.library)
    if library is None:
        return
    held = library.held
    # Send no second answer for calls that have left the library: the library may get them again before the answer
    # arrives.
    dropped = running.drop_waiting(library, held.keys() & order.calls)
    if dropped:
        state.tell(to_manager.CallsReturned(order.library, tuple(dropped)))
    rest = tuple(call for call in order.calls if call in held)
    if not rest or not library.serves:
        return
    state.out.append(SendToLibrary(library.number, running.give_back(library, calls=rest)))
    if order.running:
        lifecycle.stop_calls(state, library, rest, least_s=order.grace_s, failure=None)
        return
    for call in rest:  # evict a call that yields pieces, because no client reads them; other calls may finish
        if call in library.streams:
            state.out.append(SendToLibrary(library.number, Evict(call=call)))


def on_welcome(state: CoreState, message: to_pilot.PilotWelcome) -> None:
    """Resend messages that the manager may have missed."""
    state.answered = message.hello or state.hellos
    state.heartbeat_s, state.lease_s = max(0.1, message.heartbeat_s), message.lease_s
    state.welcomed_at = state.now
    state.heartbeat_at = 0.0  # send a heartbeat now, which reports the usage of libraries
    objects.ask_for_objects_again(state)
    running.resend_pieces(state)
    for here in state.told_snapshots if message.again else ():
        state.tell(here)


# ---- messages of libraries
def on_library_messages(state: CoreState, event: events.FromLibrary) -> None:
    library = state.libraries.get(event.library)
    if library is None:
        return
    library.times_idle = 0
    try:
        for message in event.messages:
            on_library_message(state, library, message)
    except Exception as error:
        state.log(f"lib-{library.number}: a message cannot be handled\n{traceback.format_exc()}", Severity.ERROR)
        kill_garbled_library(state, library, f"{type(error).__name__}: {error}")


def on_library_message(state: CoreState, library: PilotLibrary, message: to_agent.ToAgent) -> None:
    number = library.number
    match message:
        case to_agent.RunsEnded(ends=ends):
            running.calls_ended(state, library, ends)
        case to_agent.GivenBack(order=order) if 0 < order <= library.void_order:
            pass  # ignore this answer: its calls may have been sent to the library again
        case to_agent.GivenBack(calls=calls, need_function=need):
            library.asked_back_at = 0.0
            back = tuple(running.drop_returned(library, calls))
            state.tell(to_manager.CallsReturned(number, back, need_function=need))
        case to_agent.Reports(reports=reports):
            state.tell(to_manager.CallsProgress(number, reports))
        case to_agent.Yielded():
            running.on_pieces_yielded(state, library, message)
        case to_agent.RunEvicted(progress=progress):
            running.call_evicted(state, library, progress)
        case to_agent.Listens(call=call, port=port):
            state.tell(to_manager.GangMeets(number, call, join_address(state.facts.address, port)))
        case to_agent.Hello(pid=pid):
            library.pid = pid
            library.hello_at = state.now
            if library.stage is Stage.STARTING:
                lifecycle.move_to(library, Stage.LOADING)
                state.tell(to_manager.LibraryUpdate(number, to_manager.LibraryPhase.LOADING))
        case to_agent.Loaded():
            on_loaded(state, library, message)
        case to_agent.LoadFailed(failure=failure) | to_agent.SleepFailed(failure=failure):
            running.blame(library, failure)
        case to_agent.SnapshotMade(form=form):
            if form not in state.snapshots:
                state.snapshots.add(form)
                state.out.append(OfferSnapshot(RecipeKey(library.recipe.key), message))
        case to_agent.BatchReport(load=load, times=times):
            starting.learn_step_times(state, library, times)
            state.tell(to_manager.LibraryBatch(number, load, times))
        case to_agent.Slept():
            sleeping.slept(state, library, message)
        case to_agent.Woke():
            sleeping.woke(state, library, message)
        case to_agent.Resized():
            memory.record_library_resize(state, library, message)
        case _:
            assert_never(message)


def on_loaded(state: CoreState, library: PilotLibrary, message: to_agent.Loaded) -> None:
    if library.stage is not Stage.LOADING:
        return
    lifecycle.move_to(library, Stage.READY)
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
    state.log(f"lib-{library.number} ({library.recipe.name}) ready: {took}")
    state.tell(ready)
    memory.replace_guessed_reservation(state, library)
    for order in running.take_postponed(library):
        running.send_calls_to_process(state, library, order)


def kill_garbled_library(state: CoreState, library: PilotLibrary, reason: str) -> None:
    library.garbled = library.garbled or reason
    what = f"lib-{library.number} wrote invalid bytes to its socket: {library.garbled}"
    if not library.told_to_end:
        state.log(what, Severity.WARNING)
    lifecycle.fail_library(state, library, FailureKind.DIED, what)
