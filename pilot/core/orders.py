"""What the manager orders. `ToPilot` is matched here and nowhere else."""

from __future__ import annotations

from typing import assert_never

import msgspec

from stoker.pilot.core import lifecycle, memory, objects, running, starting
from stoker.pilot.core.commands import Acknowledged, TellLibrary, WeighOffer
from stoker.pilot.core.events import FetchFailure, OfferWeighed
from stoker.pilot.core.state import CoreState, PilotLibrary, Stage
from stoker.pilot.core.turns import why_late
from stoker.protocol.ids import CallId, LibraryId
from stoker.protocol.to_library import Evict, GiveBack, Meet
from stoker.protocol.to_manager import CallsReturned
from stoker.protocol.to_pilot import (
    Ack,
    AckPieces,
    CancelCalls,
    EvictCall,
    Exit,
    FetchObject,
    HelloAgain,
    MeetGang,
    PilotRefused,
    PilotWelcome,
    ResizeLibrary,
    RunCalls,
    StartLibrary,
    StopLibrary,
    TakeBack,
    ToPilot,
)
from stoker.units import show_bytes

_ORDERED_AGAIN = (RunCalls, StartLibrary, CancelCalls, MeetGang)
"""Orders that the manager gives again, if it still wants them, when it has read a hello that does not show them. One
that it sent before it read the last hello may arrive after that was written: carried out, it would run twice here."""


def handle(state: CoreState, message: ToPilot) -> None:
    """Carry out one order."""
    if state.answered != state.hellos and isinstance(message, _ORDERED_AGAIN):
        return
    if state.has_ended and not isinstance(message, Ack):
        return
    match message:
        case RunCalls():
            run_calls(state, message)
        case Ack(sequence=sequence):
            state.out.append(Acknowledged(sequence))
        case StartLibrary():
            starting.start_library(state, message)
        case StopLibrary(library=number, drain=drain, reason=reason):
            lifecycle.stop_library(state, number, drain=drain, reason=reason)
        case TakeBack(library=number, count=count):
            _take_back(state, number, count)
        case CancelCalls():
            _cancel(state, message)
        case EvictCall(library=number, call=call):
            if number in state.libraries:
                state.out.append(TellLibrary(number, Evict(call=call)))
        case MeetGang(library=number, call=call, address=address):
            if number in state.libraries:
                state.out.append(TellLibrary(number, Meet(call=call, address=address)))
        case AckPieces():
            running.pieces_acknowledged(state, message)
        case ResizeLibrary(library=number, device_memory_bytes=size):
            memory.resize_library(state, number, size)
        case PilotWelcome():
            _welcome(state, message)
        case HelloAgain(acknowledged=acknowledged):
            state.out.append(Acknowledged(acknowledged))
            state.hello_is_due = True
        case FetchObject():
            nowhere = objects.set_sources(state, message)
            if nowhere is not None:
                what = f"the object {nowhere.ref.name} can be had nowhere: no pilot that has it is reached"
                starting.object_lost(state, nowhere.ref.name, FetchFailure(nowhere.trouble or what))
        case PilotRefused(reason=reason):
            state.says_farewell = False
            lifecycle.leave(state, f"the manager refused this pilot: {reason}", within_s=0.0, code=3)
        case Exit(reason=reason, drain=drain, hand_on_s=hand_on_s):
            state.hands_on_until = state.now + hand_on_s
            lifecycle.drain(state, reason, within_s=float("inf") if drain else 0.0)
        case _:
            assert_never(message)


def run_calls(state: CoreState, order: RunCalls, *, is_weighed: bool = False) -> None:
    """Give a library calls that it does not hold already, or refuse them. `is_weighed`: an offer that nothing speaks
    against."""
    library = state.libraries.get(order.library)
    refused = ""
    if library is None:
        refused = f"lib-{order.library} is not on this pilot"
    elif library.told_to_end or library.stage is Stage.DRAINING:
        refused = f"lib-{order.library} is about to end"
    elif state.leaving:
        refused = f"the pilot is leaving: {state.leaving}"
    if library is None or refused:
        state.tell(CallsReturned(order.library, tuple([spec.call for spec in order.calls]), refused=refused))
        return
    held = library.held
    if held and any(spec.call in held for spec in order.calls):
        order = msgspec.structs.replace(order, calls=[spec for spec in order.calls if spec.call not in held])
        if not order.calls:
            return
    if order.offer and not is_weighed:
        state.out.append(WeighOffer(order))
        return
    options = order.options
    lifecycle.hold_calls(library, [spec.call for spec in order.calls], limit_s=options.limit_s, streams=options.stream)
    if library.stage is Stage.READY:
        running.pass_calls_on(state, library, order)
    else:
        lifecycle.postpone_order(library, order)


def offer_weighed(state: CoreState, event: OfferWeighed) -> None:
    """Take an offered call, or refuse it because it, or another one on its devices, would be late (SLINFER §VI-C), or
    because it has no room in the cache."""
    order = event.order
    library = state.libraries.get(order.library)
    if library is None or library.told_to_end or library.stage is Stage.DRAINING or state.leaving:
        run_calls(state, order, is_weighed=True)  # it is refused there
        return
    grows = order.reserve_bytes > memory.budget_bytes(state, library)
    held = max(order.reserve_bytes, *library.resizes, state.ledger.held(library.number))
    refused, required = "", 0
    if library.number in state.claims:
        refused = f"lib-{library.number} waits for memory on its devices"
    elif event.required_bytes > held:
        required = event.required_bytes
        refused = f"lib-{library.number} needs {show_bytes(required)} of device memory for it"
    elif grows and not memory.has_room(state, library, order.reserve_bytes):
        refused = f"lib-{library.number} would wait for memory on its devices"
    elif event.new is not None:
        refused = why_late(event.engines, library.number, event.new, now=state.now, free_at=event.free_at)
    if not refused:
        if grows:
            memory.resize_library(state, library.number, order.reserve_bytes)
        run_calls(state, order, is_weighed=True)
        return
    if order.reserve_bytes:
        memory.report_unchanged(state, library, ordered_bytes=order.reserve_bytes)
    calls = tuple(spec.call for spec in order.calls)
    state.tell(CallsReturned(library.number, calls, refused=refused, required_bytes=required))


def _take_back(state: CoreState, number: LibraryId, count: int) -> None:
    library = state.libraries.get(number)
    if library is None:
        return
    if library.serves:
        state.out.append(TellLibrary(number, give_back(library, count=count)))
        library.asked_back_at = library.asked_back_at or state.now
        return
    state.tell(CallsReturned(number, tuple(lifecycle.take_back_waiting(library, count))))


def _cancel(state: CoreState, order: CancelCalls) -> None:
    library = state.libraries.get(order.library)
    if library is None:
        return
    held = library.held
    strange = tuple(call for call in order.calls if call not in held)
    here = {call for call in order.calls if call in held}
    dropped = lifecycle.drop_waiting(library, here)
    if strange or dropped:
        state.tell(CallsReturned(order.library, (*strange, *dropped)))
    rest = tuple(call for call in order.calls if call in held)
    if not rest or not library.serves:
        return
    state.out.append(TellLibrary(library.number, give_back(library, calls=rest)))
    if order.running:
        running.stop_calls(state, library, rest, least_s=order.grace_s, failure=None)
        return
    for call in rest:  # those that yield may stop, since nobody takes their pieces; the others may finish
        if call in library.streams:
            state.out.append(TellLibrary(library.number, Evict(call=call)))


def give_back(library: PilotLibrary, *, count: int = 0, calls: tuple[CallId, ...] = ()) -> GiveBack:
    """An order to give calls back: so many, or these."""
    library.orders_back += 1
    return GiveBack(count=count, calls=calls, order=library.orders_back)


def _welcome(state: CoreState, message: PilotWelcome) -> None:
    state.answered = message.hello or state.hellos
    state.heartbeat_s, state.lease_s = max(0.1, message.heartbeat_s), message.lease_s
    state.welcomed_at = state.now
    state.heartbeat_at = 0.0  # the first one tells the manager what is here
    objects.ask_for_objects_again(state)
    running.resend_pieces(state)
    for here in state.told_snapshots if message.again else ():
        state.tell(here)
