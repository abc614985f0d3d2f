"""Dispatches the calls of a library to its process, and handles pieces of results and ends of calls.

Only this module changes which calls a library holds. Each call leaves its library exactly once; later messages about
the call change nothing. The pilot keeps pieces of results until the client acknowledges them. It resends them after
each welcome of the manager, and at the client's request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.pilot.core.commands import FetchArguments, ReleaseArguments, SendPieces, SendToLibrary, UploadResults
from stoker.pilot.core.events import ArgumentsFetched, ResultsUploaded
from stoker.pilot.core.state import CoreState, EndCause, PieceWindow, PilotLibrary
from stoker.protocol import to_agent, to_library, to_manager, to_pilot
from stoker.protocol.calls import WINDOW_PIECES, CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_library import GiveBack, Run
from stoker.protocol.to_manager import CallEvicted, CallsEnded, CallsReturned
from stoker.protocol.to_pilot import RunCalls


# ---- failures
def make_library_failure(state: CoreState, library: PilotLibrary, kind: FailureKind, message: str) -> Failure:
    return Failure(
        kind=kind, message=message, pilot=state.facts.pilot, library=library.number, log=state.log_path(library.number)
    )


def make_load_failure(state: CoreState, library: PilotLibrary, what: str, *, is_pilots_fault: bool) -> Failure:
    kind = FailureKind.PILOT if is_pilots_fault else FailureKind.CONTEXT
    return make_library_failure(state, library, kind, f"{library.recipe.name} on {state.facts.pilot}: {what}")


def set_end_cause(library: PilotLibrary, failure: Failure, *, printed: bool = False) -> None:
    """Record why a library ends. Later reasons are ignored."""
    library.end_cause = library.end_cause or EndCause(failure, printed)


# ---- calls of libraries
def hold_calls(library: PilotLibrary, calls: Iterable[CallId], *, limit_s: float, streams: bool) -> None:
    """Record that a library holds these calls. `streams`: True if the calls return results in pieces."""
    library.held_calls.update(dict.fromkeys(calls, limit_s))
    library.has_limits |= limit_s > 0
    if streams:
        library.piece_windows.update((call, PieceWindow()) for call in calls)


def remove_ended_calls(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    """Remove ended calls from a library. Return the calls that the library held."""
    here = remove_calls(library, calls)
    library.served += len(here)
    return here


def remove_all_calls(library: PilotLibrary, running: Iterable[CallId]) -> tuple[tuple[CallId, ...], tuple[CallId, ...]]:
    """Remove all calls from a library. Return its running calls and its other calls."""
    begun = tuple(call for call in dict.fromkeys(running) if call in library.held_calls)
    unstarted = tuple(call for call in library.held_calls if call not in begun)
    library.held_calls.clear()
    library.piece_windows.clear()
    library.stopping_calls.clear()
    library.stuck_calls.clear()
    library.postponed_orders.clear()
    library.orders_waiting_for_arguments.clear()
    return begun, unstarted


def postpone_order(library: PilotLibrary, order: RunCalls) -> None:
    library.postponed_orders.append(msgspec.structs.replace(order, calls=list(order.calls)))  # a copy, to remove calls


def take_postponed_orders(library: PilotLibrary) -> list[RunCalls]:
    orders, library.postponed_orders = library.postponed_orders, []
    return orders


def remove_newest_waiting_calls(library: PilotLibrary, count: int) -> list[CallId]:
    out: list[CallId] = []
    while library.postponed_orders and len(out) < count:
        last = library.postponed_orders[-1]
        out.append(last.calls.pop().call)
        if not last.calls:
            library.postponed_orders.pop()
    return remove_calls(library, out)


def remove_waiting_calls(library: PilotLibrary, calls: Collection[CallId]) -> list[CallId]:
    """Remove and return calls that were not sent to the library's process yet."""
    out: list[CallId] = []
    for order in (*library.postponed_orders, *library.orders_waiting_for_arguments.values()):
        out += [spec.call for spec in order.calls if spec.call in calls]
        order.calls[:] = [spec for spec in order.calls if spec.call not in calls]
    library.postponed_orders = [order for order in library.postponed_orders if order.calls]
    return remove_calls(library, out)


def remove_calls(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    """Remove calls from a library. Return the calls that the library held."""
    held = library.held_calls
    left = [call for call in calls if held.pop(call, None) is not None]
    if library.piece_windows:
        for call in left:
            library.piece_windows.pop(call, None)
    if library.stopping_calls:  # forget the stop, so that a later run of the call is not stopped
        for call in left:
            library.stopping_calls.pop(call, None)
    if library.stuck_calls:
        library.stuck_calls.difference_update(left)
    return left


def make_give_back_order(library: PilotLibrary, *, count: int = 0, calls: tuple[CallId, ...] = ()) -> GiveBack:
    library.give_back_orders += 1
    return GiveBack(count=count, calls=calls, order=library.give_back_orders)


def report_evicted_call(state: CoreState, library: PilotLibrary, progress: CallProgress) -> None:
    stop = library.stopping_calls.get(progress.call)
    if not remove_ended_calls(library, [progress.call]):
        return
    if stop is not None and stop.failure is not None:
        state.tell_manager(CallsEnded(library.number, [CallEnd(progress.call, ok=False, failure=stop.failure)]))
    else:
        state.tell_manager(CallEvicted(library.number, progress))


def _apply_stop_failure(library: PilotLibrary, end: CallEnd) -> CallEnd:
    stop = library.stopping_calls.get(end.call)
    if end.ok or stop is None or stop.failure is None:
        return end
    return msgspec.structs.replace(end, payload=b"", failure=stop.failure, raised="")


# ---- running
def send_calls_to_process(state: CoreState, library: PilotLibrary, order: RunCalls) -> None:
    """Send the calls of an order to the library's process. Fetch large arguments first."""
    if state.facts.is_carried and _fetch_missing_arguments(state, library, order):
        return
    paths: dict[str, str] = {}
    for spec in order.calls:
        ref = spec.payload
        if type(ref) is ObjectRef:
            paths[ref.name] = library.arguments.get(spec.call) or ref.source or f"{state.facts.objects}/{ref.name}"
    run = Run(
        function=order.function, calls=order.calls, options=order.options, function_blob=order.function_blob,
        gang=order.gang, objects=paths, waited_s=order.waited_s,
    )  # fmt: skip
    state.commands.append(SendToLibrary(library.number, run))


def continue_with_arguments(state: CoreState, library: PilotLibrary, event: ArgumentsFetched) -> None:
    """Send an order after its large arguments were fetched. End or return the calls with missing arguments."""
    order = library.orders_waiting_for_arguments.pop(event.ticket, None)
    for call, path in event.paths.items():
        if call in library.held_calls:
            library.arguments[call] = path
        else:
            state.commands.append(ReleaseArguments(library.number, (call,)))
    lacks = event.lacks
    held = [call for call in lacks if call in library.held_calls]
    failed = remove_ended_calls(library, [call for call in held if not lacks[call].is_pilots_fault])
    if failed:
        ends = []
        for call in failed:
            why = f"{lacks[call].reason} (on {state.facts.pilot})"
            failure = make_library_failure(state, library, FailureKind.SERIALIZATION, why)
            ends.append(CallEnd(call, ok=False, failure=failure))
        state.tell_manager(CallsEnded(library.number, ends))
    back = remove_calls(library, [call for call in held if lacks[call].is_pilots_fault])
    if back:
        reason = f"{library.recipe.name} on {state.facts.pilot}: {lacks[back[0]].reason}"
        set_end_cause(library, make_library_failure(state, library, FailureKind.PILOT, reason))
        state.tell_manager(CallsReturned(library.number, tuple(back), refused=reason))
    if order is not None:
        order.calls[:] = [spec for spec in order.calls if spec.call in library.held_calls]
        if order.calls:
            send_calls_to_process(state, library, order)


def report_ended_calls(state: CoreState, library: PilotLibrary, ends: list[CallEnd]) -> None:
    """Report ended calls to the manager. Large results are first uploaded to the session's folder."""
    if library.stopping_calls:
        ends = [_apply_stop_failure(library, end) for end in ends]
    here = remove_ended_calls(library, [end.call for end in ends])
    if len(here) != len(ends):  # some calls left earlier, or were reported twice
        first = {end.call: end for end in reversed(ends)}
        ends = [first[call] for call in here]
    if state.facts.is_carried:
        ends = _start_result_uploads(state, library, ends)
    if ends:
        state.tell_manager(CallsEnded(library.number, ends))


def report_uploaded_results(state: CoreState, event: ResultsUploaded) -> None:
    state.uploads_pending -= 1
    state.tell_manager(CallsEnded(event.library, event.ends))


def _fetch_missing_arguments(state: CoreState, library: PilotLibrary, order: RunCalls) -> bool:
    wanted = [
        (spec.call, spec.payload)
        for spec in order.calls
        if type(spec.payload) is ObjectRef and spec.call not in library.arguments
    ]
    if wanted:
        state.last_ticket += 1
        waiting = msgspec.structs.replace(order, calls=list(order.calls))
        library.orders_waiting_for_arguments[state.last_ticket] = waiting
        state.commands.append(FetchArguments(library.number, state.last_ticket, wanted))
    return bool(wanted)


def _start_result_uploads(state: CoreState, library: PilotLibrary, ends: list[CallEnd]) -> list[CallEnd]:
    done = [end.call for end in ends if end.call in library.arguments]
    if done:
        for call in done:
            del library.arguments[call]
        state.commands.append(ReleaseArguments(library.number, done))
    large = [end for end in ends if isinstance(end.payload, ObjectRef)]
    if large:
        state.uploads_pending += 1
        state.commands.append(UploadResults(library.number, large))
    return [end for end in ends if not isinstance(end.payload, ObjectRef)]


# ---- pieces of results
def keep_and_send_pieces(state: CoreState, library: PilotLibrary, message: to_agent.Yielded) -> None:
    """Keep and send the yielded pieces of a call. Raises ValueError if pieces are missing or too many are kept."""
    window = library.piece_windows.get(message.call)
    if window is None:  # the library no longer holds the call
        return
    if message.run != window.run:
        window.run, window.first = message.run, 0
        window.items.clear()
    if message.first != window.first + len(window.items):
        raise ValueError(f"piece {message.first} of call {message.call} does not follow the last piece")
    window.items.extend(message.items)
    if len(window.items) > WINDOW_PIECES:
        raise ValueError(f"call {message.call} has sent {len(window.items)} pieces that are not acknowledged")
    if not state.awaits_welcome:  # otherwise the pieces are sent after the welcome
        passed = to_manager.CallYielded(
            library.number, message.call, message.run, message.first, message.items, message.waits
        )
        state.commands.append(SendPieces(passed))


def drop_acknowledged_pieces(state: CoreState, message: to_pilot.AckPieces) -> None:
    """Drop acknowledged pieces. Resend the remaining pieces if the client requests them."""
    library = state.libraries.get(message.library)
    window = library.piece_windows.get(message.call) if library is not None else None
    if library is None or window is None:
        return
    taken = min(message.upto - window.first, len(window.items)) if message.run == window.run else 0
    if taken > 0:
        for _ in range(taken):
            window.items.popleft()
        window.first += taken
        state.commands.append(
            SendToLibrary(library.number, to_library.PiecesReceived(message.call, message.run, window.first))
        )
    if message.again and not state.awaits_welcome:
        _resend_window(state, library, message.call, window)


def resend_pieces(state: CoreState) -> None:
    for library in state.libraries.values():
        for call, window in library.piece_windows.items():
            _resend_window(state, library, call, window)


def _resend_window(state: CoreState, library: PilotLibrary, call: CallId, window: PieceWindow) -> None:
    if window.items:
        passed = to_manager.CallYielded(library.number, call, window.run, window.first, list(window.items), waits=True)
        state.commands.append(SendPieces(passed))
