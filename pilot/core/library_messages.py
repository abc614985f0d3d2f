"""Handles the messages of libraries."""

from __future__ import annotations

import traceback
from typing import assert_never

from stoker.connections import join_address
from stoker.pilot.core import holding, lifecycle, pieces, resizing, running, station, step_knowledge, stopping
from stoker.pilot.core.commands import OfferSnapshot, Severity
from stoker.pilot.core.events import FromLibrary
from stoker.pilot.core.failures import failure_of
from stoker.pilot.core.stages import Stage
from stoker.pilot.core.state import CoreState, PilotLibrary
from stoker.protocol.calls import FailureKind
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_agent import (
    BatchReport,
    GivenBack,
    Hello,
    Listens,
    Loaded,
    LoadFailed,
    Reports,
    Resized,
    RunEvicted,
    RunsEnded,
    SnapshotMade,
    ToAgent,
    Yielded,
)
from stoker.protocol.to_manager import (
    CallsProgress,
    CallsReturned,
    GangMeets,
    LibraryBatch,
    LibraryPhase,
    LibraryReady,
    LibraryUpdate,
)


def handle(state: CoreState, event: FromLibrary) -> None:
    """A library has said something. Whatever goes wrong with that is the end of this library, never of the pilot."""
    library = state.libraries.get(event.library)
    if library is None:
        return
    library.times_idle = 0
    try:
        for message in event.messages:
            _message(state, library, message)
    except Exception as error:
        state.log(f"lib-{library.number}: what it said cannot be handled\n{traceback.format_exc()}", Severity.ERROR)
        garbled(state, library, f"{type(error).__name__}: {error}")


def garbled(state: CoreState, library: PilotLibrary, reason: str) -> None:
    """What came over a library's socket cannot be read: that is the end of this library."""
    library.garbled = library.garbled or reason
    what = f"lib-{library.number} wrote bytes to its socket that are no message: {library.garbled}"
    if not library.told_to_end:
        state.log(what, Severity.WARNING)
    lifecycle.kill(state, library, cause=failure_of(state, library, FailureKind.DIED, what), printed=True)


def _message(state: CoreState, library: PilotLibrary, message: ToAgent) -> None:
    number = library.number
    match message:
        case RunsEnded(ends=ends):
            running.ended(state, library, ends)
        case GivenBack(order=order) if 0 < order <= library.void_order:
            pass  # the calls may have been sent to it again since
        case GivenBack(calls=calls, need_function=need):
            library.asked_back_at = 0.0
            state.tell(CallsReturned(number, tuple(holding.returned(library, calls)), need_function=need))
        case Reports(reports=reports):
            state.tell(CallsProgress(number, reports))
        case Yielded():
            pieces.came(state, library, message)
        case RunEvicted(progress=progress):
            stopping.evicted(state, library, progress)
        case Listens(call=call, port=port):
            state.tell(GangMeets(number, call, join_address(state.facts.address, port)))
        case Hello(pid=pid):
            library.pid = pid
            library.hello_at = state.now
            if library.stage is Stage.STARTING:
                lifecycle.move(library, Stage.LOADING)
                state.tell(LibraryUpdate(number, LibraryPhase.LOADING))
        case Loaded():
            _loaded(state, library, message)
        case LoadFailed(failure=failure):
            lifecycle.blame(library, failure)
        case SnapshotMade(form=form):
            if form not in state.snapshots:
                state.snapshots.add(form)
                state.out.append(OfferSnapshot(RecipeKey(library.recipe.key), message))
        case BatchReport(load=load, times=times):
            step_knowledge.learn(state, library, times)
            state.tell(LibraryBatch(number, load, times))
        case Resized():
            resizing.answered(state, library, message)
        case _:
            assert_never(message)


def _loaded(state: CoreState, library: PilotLibrary, message: Loaded) -> None:
    if library.stage is not Stage.LOADING:
        return
    lifecycle.move(library, Stage.READY)
    library.resident_bytes, library.ready_at = message.resident_bytes, state.now
    library.slots = message.slots
    own = state.devices_of(library)[0].process_bytes
    if message.device_bytes:  # what torch holds; CUDA has taken more for the process
        library.device_bytes = max(library.device_bytes, message.device_bytes + own)
    ready = LibraryReady(
        library=library.number,
        start_s=library.hello_at - library.started_at if message.start_s is None else message.start_s,
        load_s=message.load_s,
        resident_bytes=message.resident_bytes,
        peak_bytes=message.peak_bytes,
        device_bytes=library.device_bytes,
        fetch_s=library.fetched_at - library.ordered_at if library.has_pins else 0.0,
        slots=library.slots,
    )
    state.log(
        f"lib-{library.number} ({library.recipe.name}) ready: {ready.start_s:.3f} s to start,"
        f" {ready.load_s:.2f} s to load"
    )
    state.tell(ready)
    _settle_reservation(state, library)
    for order in holding.due(library):
        running.pass_on(state, library, order)


def _settle_reservation(state: CoreState, library: PilotLibrary) -> None:
    """Where nothing was declared the reservation was a guess: hold what was measured, as far as there is room. What
    nobody has measured yet on a GPU stays a guess until its monitor has (see `device_memory`)."""
    if station.is_declared(state, library):
        return
    number, devices = library.number, state.devices_of(library)
    on_host = devices[0].on_host
    took = library.resident_bytes // len(devices) if on_host else library.device_bytes
    if not took or (not on_host and devices[0].processes == 1):
        return
    room = min(state.ledger.free(device.device) for device in devices) + state.ledger.held(number)
    state.ledger.resize(number, memory_bytes=min(took, room))
