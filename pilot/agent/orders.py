"""What the manager orders, and what is done about it."""

from __future__ import annotations

import logging
import time
from typing import assert_never

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.manager.protocol.blocks import LossReason
from stoker.manager.protocol.calls import CallEnd, FailureKind
from stoker.manager.protocol.to_library import Evict, Meet, Resize, Run, Stop
from stoker.manager.protocol.to_manager import CallsEnded, CallsReturned, LibraryGone, LibraryResized
from stoker.manager.protocol.to_pilot import (
    Ack,
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
from stoker.pilot.agent import ending, objects, payloads, starting
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.failures import failure_of
from stoker.pilot.agent.library import Library
from stoker.pilot.core.library import State

log = logging.getLogger("stoker.pilot")


def handle(agent: Agent, message: ToPilot) -> None:
    """Carry out one order."""
    match message:
        case RunCalls():
            run(agent, message)
        case Ack(sequence=sequence):
            agent.link.acked(sequence)
        case StartLibrary():
            starting.order(agent, message)
        case StopLibrary(library=number, drain=drain, reason=reason):
            stop(agent, number, drain=drain, reason=reason)
        case TakeBack(library=number, count=count):
            _take_back(agent, number, count)
        case CancelCalls():
            _cancel(agent, message)
        case EvictCall(library=number, call=call):
            library = agent.libraries.get(number)
            if library is not None:
                agent.wires.tell(library, Evict(call=call))
        case MeetGang(library=number, call=call, address=address):
            library = agent.libraries.get(number)
            if library is not None:
                agent.wires.tell(library, Meet(call=call, address=address))
        case ResizeLibrary(library=number, device_memory_bytes=size):
            _resize(agent, number, size)
        case PilotWelcome(heartbeat_s=heartbeat_s, lease_s=lease_s, again=again):
            agent.heartbeat_s, agent.lease_s = max(0.1, heartbeat_s), lease_s
            agent.welcomed_at = time.monotonic()
            agent.heartbeat_at = 0.0  # the first one tells the manager what is here
            objects.again(agent)
            for here in agent.told_snapshots if again else ():
                agent.link.post(here)
        case HelloAgain(acknowledged=acknowledged):
            agent.link.acked(acknowledged)
            agent.link.hello_is_due = True
        case FetchObject():
            objects.told_sources(agent, message)
        case PilotRefused(reason=reason):
            agent.farewell = False
            agent.leave(f"the manager refused this pilot: {reason}", within_s=0.0, code=3)
        case Exit(reason=reason, drain=drain, hand_on_s=hand_on_s):
            agent.objects.stay(until=time.monotonic() + hand_on_s)
            drain_all(agent, reason, within_s=float("inf") if drain else 0.0)
        case _:
            assert_never(message)


def run(agent: Agent, order: RunCalls) -> None:
    """Give a library calls that it does not hold already, or refuse them."""
    library = agent.libraries.get(order.library)
    refused = ""
    if library is None:
        refused = f"lib-{order.library} is not on this pilot"
    elif library.told_to_end or library.state.state is State.DRAINING:
        refused = f"lib-{order.library} is about to end"
    elif agent.leaving:
        refused = f"the pilot is leaving: {agent.leaving}"
    if library is None or refused:
        agent.link.post(CallsReturned(order.library, tuple(spec.call for spec in order.calls), refused=refused))
        return
    held = library.state.held
    if held and any(spec.call in held for spec in order.calls):
        order = msgspec.structs.replace(order, calls=[spec for spec in order.calls if spec.call not in held])
        if not order.calls:
            return
    limit_s = order.options.limit_s
    library.state.hold([spec.call for spec in order.calls], limit_s=limit_s)
    library.has_limits |= limit_s > 0
    if library.state.state is State.READY:
        pass_on(agent, library, order)
    else:
        library.waiting.append(order)


def pass_on(agent: Agent, library: Library, order: RunCalls) -> None:
    """Hand an order's calls to the library's process."""
    if payloads.bring(agent, library, order, lambda: pass_on(agent, library, order)):
        return
    paths: dict[str, str] = {}
    for spec in order.calls:
        if type(spec.payload) is ObjectRef:
            paths[spec.payload.name] = payloads.path_of(agent, library, spec, spec.payload)
    agent.wires.tell(
        library,
        Run(
            function=order.function,
            calls=order.calls,
            options=order.options,
            function_blob=order.function_blob,
            gang=order.gang,
            objects=paths,
        ),
    )


def stop(agent: Agent, number: int, *, drain: bool, reason: str) -> None:
    """End a library."""
    library = agent.find(number)
    if library is None:
        agent.link.post(LibraryGone(library=number))  # type: ignore[arg-type]
        return
    log.info("lib-%d is told to end: %s", number, reason)
    if not drain or library.state.state not in (State.READY, State.DRAINING):
        ending.kill(agent, library)
    elif not library.told_to_end:
        library.told_to_end = True
        library.state.move(State.DRAINING)
        agent.wires.tell(library, Stop())


def drain_all(agent: Agent, reason: str, *, within_s: float, loss: LossReason | None = None) -> None:
    """Begin to leave: running calls may finish within this time, others are given back. `loss`: as in `leave`."""
    agent.leave(reason, within_s=within_s, loss=loss)
    for number in list(agent.libraries):
        stop(agent, number, drain=within_s > 0, reason=reason)


def _take_back(agent: Agent, number: int, count: int) -> None:
    library = agent.find(number)
    if library is None:
        return
    if library.state.state in (State.READY, State.DRAINING):
        agent.wires.tell(library, library.give_back(count=count))
        library.asked_back_at = library.asked_back_at or time.monotonic()
        return
    back = library.state.returned(library.take_back_waiting(count))  # type: ignore[arg-type]
    agent.link.post(CallsReturned(library.state.library, tuple(back)))


def _cancel(agent: Agent, order: CancelCalls) -> None:
    library = agent.libraries.get(order.library)
    if library is None:
        return
    held = library.state.held
    strange = tuple(call for call in order.calls if call not in held)
    here = tuple(call for call in order.calls if call in held)
    dropped = library.state.returned(library.drop_waiting(set(here)))  # type: ignore[arg-type]
    if strange or dropped:
        agent.link.post(CallsReturned(order.library, (*strange, *dropped)))
    rest = tuple(call for call in here if call in held)
    if rest and library.state.state in (State.READY, State.DRAINING):
        agent.wires.tell(library, library.give_back(calls=rest))
        if order.running:
            if order.grace_s:
                for call in rest:
                    agent.wires.tell(library, Evict(call=call))
            library.cancelling.update(dict.fromkeys(rest, time.monotonic() + order.grace_s))


def _resize(agent: Agent, number: int, size: int) -> None:
    library = agent.find(number)
    if library is None:
        return
    try:
        if size > agent.ledger.held(library.state.library):
            agent.ledger.resize(library.state.library, memory_bytes=size)  # first the room, then its use
    except ValueError as error:
        log.warning("lib-%d is not resized: %s", number, error)
        agent.link.post(LibraryResized(library.state.library, agent.ledger.held(library.state.library)))
        return
    library.resizes += 1
    agent.wires.tell(library, Resize(device_memory_bytes=size))


def time_out(agent: Agent, library: Library, call: int, *, limit_s: float, ran_s: float) -> None:
    """A call ran too long: it ends as failed, and its library, which nothing else can stop, with it."""
    what = f"the call ran for {ran_s:.1f} s on {agent.options.pilot}; its limit is {limit_s:g} s"
    failure = failure_of(agent, library, FailureKind.TIMEOUT, what)
    ended = library.state.ended([call])  # type: ignore[list-item]
    agent.link.post(CallsEnded(library.state.library, [CallEnd(one, ok=False, failure=failure) for one in ended]))
    ending.kill(agent, library, cause=failure)
