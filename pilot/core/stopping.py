"""How a running call is stopped, at the least cost that its code allows.

1. It is told to stop. Its library aborts what the call has asked of a model, and the function ends at its next wait for
   a model or its next progress report. That costs nothing else.
2. A call that still runs when its grace is over does not react. Its end is told now, and its library takes no further
   calls: it gives back those that it has not begun, and finishes the others that it runs.
3. A library that runs nothing but such calls is killed. Its context is loaded again where calls want it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from stoker.manager.protocol.calls import CallEnd, CallProgress, Failure, FailureKind
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_library import Evict
from stoker.manager.protocol.to_manager import CallEvicted, CallsEnded
from stoker.pilot.core import holding, leaving, lifecycle
from stoker.pilot.core.commands import SetTimer, TellLibrary
from stoker.pilot.core.failures import failure_of
from stoker.pilot.core.state import CoreState, PilotLibrary, StoppingCall
from stoker.units import show_seconds

LEAST_GRACE_S, MOST_GRACE_S = 1.0, 10.0
"""The bounds of the time that a call has to react."""
ANSWER_S = 1.0
"""A library that is to give back what it has not begun, and has not done so for this long, lets no thread of it run."""


def ask(
    state: CoreState, library: PilotLibrary, calls: Iterable[CallId], *, least_s: float = 0.0, failure: Failure | None
) -> None:
    """Tell running calls to stop. They have a grace of `least_s` or more; `failure` is how each ends that has no result
    then (None: somebody else has told its end)."""
    until = state.now + max(least_s, grace_s(library))
    for call in calls:
        state.out.append(TellLibrary(library.number, Evict(call=call)))
        library.stopping.setdefault(call, StoppingCall(until, failure))
    state.out.append(SetTimer(until, f"cancel/{library.number}"))


def grace_s(library: PilotLibrary) -> float:
    """How long a call has to react: as long as its library took to load, within bounds. To wait longer than a load
    would cost more than to kill the library."""
    return min(MOST_GRACE_S, max(LEAST_GRACE_S, library.ready_at - library.started_at))


def was_stopped(library: PilotLibrary, seconds: float) -> None:
    """Nothing of the pilot ran for this time: its calls could not react."""
    for call, stop in library.stopping.items():
        library.stopping[call] = msgspec.structs.replace(stop, until=stop.until + seconds)


def evicted(state: CoreState, library: PilotLibrary, progress: CallProgress) -> None:
    """A call has stopped as it was told. It counts as served: the library counts it too."""
    stop = library.stopping.get(progress.call)
    if not holding.ended(library, [progress.call]):
        return
    if stop is not None and stop.failure is not None:
        state.tell(CallsEnded(library.number, [CallEnd(progress.call, ok=False, failure=stop.failure)]))
    else:
        state.tell(CallEvicted(library.number, progress))


def as_stopped(library: PilotLibrary, ends: list[CallEnd]) -> list[CallEnd]:
    """The ends of calls, where those that failed because they were told to stop have that failure. A result counts."""

    def one(end: CallEnd) -> CallEnd:
        stop = library.stopping.get(end.call)
        if end.ok or stop is None or stop.failure is None:
            return end
        return msgspec.structs.replace(end, payload=b"", failure=stop.failure, raised="")

    return [one(end) for end in ends]


def observed(state: CoreState, library: PilotLibrary, running: Sequence[CallId]) -> None:
    """Go on with calls that do not react, when it was observed what runs."""
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
    """These calls do not react: tell their ends, and have the library take nothing new."""
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
