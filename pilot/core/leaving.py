"""How a pilot begins to leave. This file alone writes that it does."""

from __future__ import annotations

from stoker.pilot.core import lifecycle
from stoker.pilot.core.commands import TellLibrary
from stoker.pilot.core.stages import Stage
from stoker.pilot.core.state import CoreState
from stoker.protocol.blocks import LossReason
from stoker.protocol.to_library import Stop
from stoker.protocol.to_manager import LibraryGone

HAND_ON_S = 5.0
"""How long a pilot that could leave goes on serving those that are getting something from it."""
FORCED_S = 1.0
"""A pilot that should have left is gone after so long, whatever is still there."""


def leave(state: CoreState, reason: str, *, within_s: float, code: int = 0, loss: LossReason | None = None) -> None:
    """Begin to end. Called again it can only make it sooner. `loss`: why the manager is to count it as lost."""
    if not state.leaving:
        state.log(f"leaving: {reason}")
        state.exit_code = code
        state.loss = loss
    state.leaving = state.leaving or reason
    state.leave_by = min(state.leave_by, state.now + within_s)


def drain(state: CoreState, reason: str, *, within_s: float, code: int = 0, loss: LossReason | None = None) -> None:
    """Begin to leave: running calls may finish within this time, others are given back. `loss`: as in `leave`."""
    leave(state, reason, within_s=within_s, code=code, loss=loss)
    for number in list(state.libraries):
        stop(state, number, drain=within_s > 0, reason=reason)


def stop(state: CoreState, number: int, *, drain: bool, reason: str) -> None:
    """End a library."""
    library = state.libraries.get(number)  # type: ignore[call-overload]
    if library is None:
        state.tell(LibraryGone(library=number))  # type: ignore[arg-type]
        return
    state.log(f"lib-{number} is told to end: {reason}")
    if not drain or not library.serves:
        lifecycle.kill(state, library)
    elif not library.told_to_end:
        library.told_to_end = True
        lifecycle.move(library, Stage.DRAINING)
        state.out.append(TellLibrary(library.number, Stop()))


def is_over(state: CoreState, *, serves_peers: bool) -> bool:
    """Whether a pilot that leaves has nothing left to do, or no time left to do it."""
    if not state.leaving:
        return False
    if state.now > state.leave_by + FORCED_S:
        return True
    return not state.libraries and not state.handing_in and not _hands_on(state, serves_peers=serves_peers)


def _hands_on(state: CoreState, *, serves_peers: bool) -> bool:
    """Whether a pilot that has nothing else to do had better stay a little: others are getting objects from it."""
    if state.now < state.hands_on_until:
        return True
    if not serves_peers:
        return False
    state.serves_until = state.serves_until or state.now + HAND_ON_S
    return state.now < state.serves_until
