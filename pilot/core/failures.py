"""What the manager is told of a library or a call that failed here, and whose fault it was."""

from __future__ import annotations

from stoker.pilot.core.state import CoreState, PilotLibrary
from stoker.protocol.calls import Failure, FailureKind


def failure_of(state: CoreState, library: PilotLibrary, kind: FailureKind, message: str) -> Failure:
    """The failure of a library, or of a call on it."""
    return Failure(
        kind=kind,
        message=message,
        pilot=state.facts.pilot,
        library=library.number,
        log=state.log_of(library.number),
    )


def load_failure(state: CoreState, library: PilotLibrary, what: str, *, is_pilots_fault: bool) -> Failure:
    """Why a library will hold nothing."""
    kind = FailureKind.PILOT if is_pilots_fault else FailureKind.CONTEXT
    return failure_of(state, library, kind, f"{library.recipe.name} on {state.facts.pilot}: {what}")
