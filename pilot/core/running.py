"""Running calls: passed to libraries, stopped, and their pieces.

How the pilot stops a call, at the least cost that the call's code allows:

1. It tells the call to stop. The function ends at its next wait for a model or its next progress report.
2. If the call still runs after its grace, the pilot reports its end and drains the library.
3. It kills the library when only calls that do not react run in it.

Pieces of results are neither in the journal nor in numbered frames. The pilot keeps those that the client has not
acknowledged, and sends them again after each welcome or when the client asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.pilot.core import lifecycle
from stoker.pilot.core.commands import BringArguments, HandIn, PassOn, ReleaseArguments, SetTimer, TellLibrary
from stoker.pilot.core.events import ArgumentsBrought, HandedIn
from stoker.pilot.core.lifecycle import failure_of
from stoker.pilot.core.state import CoreState, PieceWindow, PilotLibrary, StoppingCall
from stoker.protocol import to_agent, to_library, to_manager, to_pilot
from stoker.protocol.calls import WINDOW_PIECES, CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_library import Evict, GiveBack, Run
from stoker.protocol.to_manager import CallEvicted, CallsEnded, CallsReturned
from stoker.protocol.to_pilot import RunCalls
from stoker.units import show_seconds


def give_back(library: PilotLibrary, *, count: int = 0, calls: tuple[CallId, ...] = ()) -> GiveBack:
    """An order to give calls back: so many, or these."""
    library.orders_back += 1
    return GiveBack(count=count, calls=calls, order=library.orders_back)


# ---- stopping

LEAST_GRACE_S, MOST_GRACE_S = 1.0, 10.0  # seconds that a call has to react, at least and at most
ANSWER_S = 1.0  # seconds in which a draining library returns the calls that it has not begun


def stop_calls(
    state: CoreState, library: PilotLibrary, calls: Iterable[CallId], *, least_s: float = 0.0, failure: Failure | None
) -> None:
    """Tell running calls to stop, with a grace of at least `least_s`."""
    until = state.now + max(least_s, grace_s(library))
    for call in calls:
        state.out.append(TellLibrary(library.number, Evict(call=call)))
        library.stopping.setdefault(call, StoppingCall(until, failure))
    state.out.append(SetTimer(until, f"cancel/{library.number}"))


def grace_s(library: PilotLibrary) -> float:
    """Seconds that a call has to react: the load time of its library, within bounds."""
    return min(MOST_GRACE_S, max(LEAST_GRACE_S, library.ready_at - library.started_at))


def extend_graces(library: PilotLibrary, seconds: float) -> None:
    """Extend the graces by the time in which the pilot and its libraries were suspended."""
    for call, stop in library.stopping.items():
        library.stopping[call] = msgspec.structs.replace(stop, until=stop.until + seconds)


def call_evicted(state: CoreState, library: PilotLibrary, progress: CallProgress) -> None:
    """Handle the end of a call that stopped as it was told. It counts as served, as in the library."""
    stop = library.stopping.get(progress.call)
    if not lifecycle.drop_ended(library, [progress.call]):
        return
    if stop is not None and stop.failure is not None:
        state.tell(CallsEnded(library.number, [CallEnd(progress.call, ok=False, failure=stop.failure)]))
    else:
        state.tell(CallEvicted(library.number, progress))


def as_stopped(library: PilotLibrary, ends: list[CallEnd]) -> list[CallEnd]:
    """Return the ends of calls."""

    def one(end: CallEnd) -> CallEnd:
        stop = library.stopping.get(end.call)
        if end.ok or stop is None or stop.failure is None:
            return end
        return msgspec.structs.replace(end, payload=b"", failure=stop.failure, raised="")

    return [one(end) for end in ends]


def check_stopping(state: CoreState, library: PilotLibrary, running: Sequence[CallId]) -> None:
    """Check the calls that were told to stop against the calls that run."""
    stuck = [call for call in running if (stop := library.stopping.get(call)) is not None and state.now >= stop.until]
    if stuck:
        _give_up(state, library, stuck)
    if not any(call in library.stuck for call in running):
        return
    others = [call for call in library.held if call not in library.stuck]
    gave_back = not others or state.now > library.stuck_at + ANSWER_S
    if gave_back and not any(call in running for call in others):
        lifecycle.kill_library(state, library)


def _give_up(state: CoreState, library: PilotLibrary, calls: list[CallId]) -> None:
    failure = library.stopping[calls[0]].failure
    if failure is None:
        what = (
            f"a call that ran on lib-{library.number} was cancelled and did not stop within"
            f" {show_seconds(grace_s(library))}, and its library ended with it"
        )
        failure = failure_of(state, library, FailureKind.CANCELLED, what)
    ends = [
        CallEnd(call, ok=False, failure=stop.failure)
        for call in calls
        if (stop := library.stopping[call]).failure is not None
    ]
    if ends:
        lifecycle.drop_ended(library, [end.call for end in ends])
        state.tell(CallsEnded(library.number, ends))
    lifecycle.does_not_react(library, calls, now=state.now)
    lifecycle.blame(library, failure, printed=True)
    lifecycle.stop_library(state, library.number, drain=True, reason=failure.message)


# ---- running


def pass_calls_on(state: CoreState, library: PilotLibrary, order: RunCalls) -> None:
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


def arguments_brought(state: CoreState, library: PilotLibrary, event: ArgumentsBrought) -> None:
    """Large arguments of an order are here, or not."""
    order = library.orders_waiting_for_arguments.pop(event.ticket, None)
    for call, path in event.paths.items():
        if call in library.held:
            library.arguments[call] = path
        else:
            state.out.append(ReleaseArguments(library.number, (call,)))
    lacks = event.lacks
    held = [call for call in lacks if call in library.held]
    failed = lifecycle.drop_ended(library, [call for call in held if not lacks[call].is_pilots_fault])
    if failed:
        ends = [CallEnd(call, ok=False, failure=_failure(state, library, lacks[call].reason)) for call in failed]
        state.tell(CallsEnded(library.number, ends))
    back = lifecycle.drop_returned(library, [call for call in held if lacks[call].is_pilots_fault])
    if back:
        reason = f"{library.recipe.name} on {state.facts.pilot}: {lacks[back[0]].reason}"
        lifecycle.blame(library, failure_of(state, library, FailureKind.PILOT, reason))
        state.tell(CallsReturned(library.number, tuple(back), refused=reason))
    if order is not None:
        order.calls[:] = [spec for spec in order.calls if spec.call in library.held]
        if order.calls:
            pass_calls_on(state, library, order)


def calls_ended(state: CoreState, library: PilotLibrary, ends: list[CallEnd]) -> None:
    """Calls have ended in a library: tell the manager, of large results once the client will find them."""
    if library.stopping:
        ends = as_stopped(library, ends)
    here = lifecycle.drop_ended(library, [end.call for end in ends])
    if len(here) != len(ends):  # of calls that have left already, or one that is told twice
        first = {end.call: end for end in reversed(ends)}
        ends = [first[call] for call in here]
    if state.facts.is_carried:
        ends = _hand_in(state, library, ends)
    if ends:
        state.tell(CallsEnded(library.number, ends))


def results_handed_in(state: CoreState, event: HandedIn) -> None:
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


# ---- pieces of results


def pieces_yielded(state: CoreState, library: PilotLibrary, message: to_agent.Yielded) -> None:
    """A call has yielded. Raises ValueError for pieces that do not follow those before, or are too many."""
    window = library.streams.get(message.call)
    if window is None:  # it was taken away from the library meanwhile
        return
    if message.run != window.run:
        window.begin(message.run)
    if message.first != window.first + len(window.items):
        raise ValueError(f"piece {message.first} of call {message.call} does not follow the one before")
    window.items.extend(message.items)
    if len(window.items) > WINDOW_PIECES:
        raise ValueError(f"call {message.call} has sent {len(window.items)} pieces that are not acknowledged")
    if not state.awaits_welcome:  # else they are said with the rest, after the welcome
        passed = to_manager.CallYielded(
            library.number, message.call, message.run, message.first, message.items, message.waits
        )
        state.out.append(PassOn(passed))


def pieces_acknowledged(state: CoreState, message: to_pilot.AckPieces) -> None:
    """The client has pieces, and perhaps asks for those after them."""
    library = state.libraries.get(message.library)
    window = library.streams.get(message.call) if library is not None else None
    if library is None or window is None:
        return
    if message.run == window.run and window.take(message.upto):
        upto = to_library.Taken(message.call, message.run, window.first)
        state.out.append(TellLibrary(library.number, upto))
    if message.again and not state.awaits_welcome:
        _say_again(state, library, message.call, window)


def resend_pieces(state: CoreState) -> None:
    """The manager may have lost what it was told: say all that is not acknowledged."""
    for library in state.libraries.values():
        for call, window in library.streams.items():
            _say_again(state, library, call, window)


def _say_again(state: CoreState, library: PilotLibrary, call: CallId, window: PieceWindow) -> None:
    if window.items:
        items = list(window.items)
        passed = to_manager.CallYielded(library.number, call, window.run, window.first, items, waits=True)
        state.out.append(PassOn(passed))
