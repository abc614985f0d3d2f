"""How the pilot stops a running call, at the least cost that the call's code allows.

1. The pilot tells the call to stop. Its library aborts the call's requests to a model, and the function ends at its
   next wait for a model or its next progress report. The library and its other calls continue.
2. A call that still runs after its grace does not react. The pilot tells the manager its end, and drains the library:
   the library returns the calls that it has not begun, and finishes its other running calls.
3. The pilot kills the library when only calls that do not react run in it. Calls that need the context load it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from stoker.pilot.core import holding, leaving, lifecycle
from stoker.pilot.core.commands import SetTimer, TellLibrary
from stoker.pilot.core.failures import failure_of
from stoker.pilot.core.state import CoreState, PilotLibrary, StoppingCall
from stoker.protocol.calls import CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_library import Evict
from stoker.protocol.to_manager import CallEvicted, CallsEnded
from stoker.units import show_seconds

LEAST_GRACE_S, MOST_GRACE_S = 1.0, 10.0
"""Seconds that a call has to react, at least and at most."""
ANSWER_S = 1.0
"""Seconds in which a draining library returns the calls that it has not begun. If it does not, its code holds the
interpreter, and no thread of it reads messages."""


def ask(
    state: CoreState, library: PilotLibrary, calls: Iterable[CallId], *, least_s: float = 0.0, failure: Failure | None
) -> None:
    """Tell running calls to stop, with a grace of at least `least_s`. `failure` is the end of a call without a result;
    None if the manager has ended the call already."""
    until = state.now + max(least_s, grace_s(library))
    for call in calls:
        state.out.append(TellLibrary(library.number, Evict(call=call)))
        library.stopping.setdefault(call, StoppingCall(until, failure))
    state.out.append(SetTimer(until, f"cancel/{library.number}"))


def grace_s(library: PilotLibrary) -> float:
    """Seconds that a call has to react: the load time of its library, within bounds. A longer wait would cost more than
    a kill and a load."""
    return min(MOST_GRACE_S, max(LEAST_GRACE_S, library.ready_at - library.started_at))


def was_stopped(library: PilotLibrary, seconds: float) -> None:
    """Extend the graces by the time in which the pilot and its libraries were suspended."""
    for call, stop in library.stopping.items():
        library.stopping[call] = msgspec.structs.replace(stop, until=stop.until + seconds)


def evicted(state: CoreState, library: PilotLibrary, progress: CallProgress) -> None:
    """Handle the end of a call that stopped as it was told. It counts as served, as in the library."""
    stop = library.stopping.get(progress.call)
    if not holding.ended(library, [progress.call]):
        return
    if stop is not None and stop.failure is not None:
        state.tell(CallsEnded(library.number, [CallEnd(progress.call, ok=False, failure=stop.failure)]))
    else:
        state.tell(CallEvicted(library.number, progress))


def as_stopped(library: PilotLibrary, ends: list[CallEnd]) -> list[CallEnd]:
    """Return the ends of calls. A call that was told to stop and raised an exception gets the failure of its stop; a
    call that returned keeps its result."""

    def one(end: CallEnd) -> CallEnd:
        stop = library.stopping.get(end.call)
        if end.ok or stop is None or stop.failure is None:
            return end
        return msgspec.structs.replace(end, payload=b"", failure=stop.failure, raised="")

    return [one(end) for end in ends]


def observed(state: CoreState, library: PilotLibrary, running: Sequence[CallId]) -> None:
    """Check the calls that were told to stop against the calls that run."""
    stuck = [call for call in running if (stop := library.stopping.get(call)) is not None and state.now >= stop.until]
    if stuck:
        _give_up(state, library, stuck)
    if not any(call in library.stuck for call in running):
        return
    others = [call for call in library.held if call not in library.stuck]
    gave_back = not others or state.now > library.stuck_at + ANSWER_S
    if gave_back and not any(call in running for call in others):
        lifecycle.kill(state, library)


def _give_up(state: CoreState, library: PilotLibrary, calls: list[CallId]) -> None:
    """Report the ends of calls that do not react, and drain their library."""
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
        holding.ended(library, [end.call for end in ends])
        state.tell(CallsEnded(library.number, ends))
    holding.does_not_react(library, calls, now=state.now)
    lifecycle.blame(library, failure, printed=True)
    leaving.stop(state, library.number, drain=True, reason=failure.message)
