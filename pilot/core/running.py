"""How calls get to a library's process, and large results from it."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.pilot.core import holding, lifecycle, stopping
from stoker.pilot.core.commands import BringArguments, HandIn, ReleaseArguments, TellLibrary
from stoker.pilot.core.events import ArgumentsBrought, HandedIn
from stoker.pilot.core.failures import failure_of
from stoker.pilot.core.state import CoreState, PilotLibrary
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.to_library import Run
from stoker.protocol.to_manager import CallsEnded, CallsReturned
from stoker.protocol.to_pilot import RunCalls


def pass_on(state: CoreState, library: PilotLibrary, order: RunCalls) -> None:
    """Hand an order's calls to the library's process, once their arguments are here."""
    if state.facts.is_carried and _bring(state, library, order):
        return
    paths: dict[str, str] = {}
    for spec in order.calls:
        ref = spec.payload
        if type(ref) is ObjectRef:
            here = library.arguments.get(spec.call)
            paths[ref.name] = here or ref.source or f"{state.facts.objects}/{ref.name}"
    state.out.append(
        TellLibrary(
            library.number,
            Run(
                function=order.function,
                calls=order.calls,
                options=order.options,
                function_blob=order.function_blob,
                gang=order.gang,
                objects=paths,
                waited_s=order.waited_s,
            ),
        )
    )


def brought(state: CoreState, library: PilotLibrary, event: ArgumentsBrought) -> None:
    """Large arguments of an order are here, or not. Calls whose arguments are lacking end, or go elsewhere where
    another pilot may have room for them."""
    order = library.orders_waiting_for_arguments.pop(event.ticket, None)
    for call, path in event.paths.items():
        if call in library.held:
            library.arguments[call] = path
        else:
            state.out.append(ReleaseArguments(library.number, (call,)))
    lacks = event.lacks
    held = [call for call in lacks if call in library.held]
    failed = holding.ended(library, [call for call in held if not lacks[call].is_pilots_fault])
    if failed:
        ends = [CallEnd(call, ok=False, failure=_failure(state, library, lacks[call].reason)) for call in failed]
        state.tell(CallsEnded(library.number, ends))
    back = holding.returned(library, [call for call in held if lacks[call].is_pilots_fault])
    if back:
        reason = f"{library.recipe.name} on {state.facts.pilot}: {lacks[back[0]].reason}"
        lifecycle.blame(library, failure_of(state, library, FailureKind.PILOT, reason))
        state.tell(CallsReturned(library.number, tuple(back), refused=reason))
    if order is not None:
        order.calls[:] = [spec for spec in order.calls if spec.call in library.held]
        if order.calls:
            pass_on(state, library, order)


def ended(state: CoreState, library: PilotLibrary, ends: list[CallEnd]) -> None:
    """Calls have ended in a library: tell the manager, of large results once the client will find them."""
    if library.stopping:
        ends = stopping.as_stopped(library, ends)
    here = holding.ended(library, [end.call for end in ends])
    if len(here) != len(ends):  # of calls that have left already, or one that is told twice
        first = {end.call: end for end in reversed(ends)}
        ends = [first[call] for call in here]
    if state.facts.is_carried:
        ends = _hand_in(state, library, ends)
    if ends:
        state.tell(CallsEnded(library.number, ends))


def handed_in(state: CoreState, event: HandedIn) -> None:
    """Large results are where the client finds them."""
    state.handing_in -= 1
    state.tell(CallsEnded(event.library, event.ends))


def _bring(state: CoreState, library: PilotLibrary, order: RunCalls) -> bool:
    """Whether arguments of these calls have to be brought first. The order then waits in its library."""
    wanted = [
        (spec.call, spec.payload)
        for spec in order.calls
        if type(spec.payload) is ObjectRef and spec.call not in library.arguments
    ]
    if wanted:
        state.last_ticket += 1
        waiting = msgspec.structs.replace(order, calls=list(order.calls))
        library.orders_waiting_for_arguments[state.last_ticket] = waiting
        state.out.append(BringArguments(library.number, state.last_ticket, wanted))
    return bool(wanted)


def _hand_in(state: CoreState, library: PilotLibrary, ends: list[CallEnd]) -> list[CallEnd]:
    """Have large results brought to the session; returns the ends that can be told now."""
    done = [end.call for end in ends if end.call in library.arguments]
    if done:
        for call in done:
            del library.arguments[call]
        state.out.append(ReleaseArguments(library.number, done))
    large = [end for end in ends if isinstance(end.payload, ObjectRef)]
    if large:
        state.handing_in += 1
        state.out.append(HandIn(library.number, large))
    return [end for end in ends if not isinstance(end.payload, ObjectRef)]


def _failure(state: CoreState, library: PilotLibrary, message: str) -> Failure:
    return failure_of(state, library, FailureKind.SERIALIZATION, f"{message} (on {state.facts.pilot})")
