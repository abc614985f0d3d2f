"""What is said of a library whose process ended without an answer."""

from __future__ import annotations

from stoker.pilot.agent.usage import tail
from stoker.pilot.taskvine.messages import OVER_LIMIT, OVER_MEMORY, Note
from stoker.protocol.calls import Failure, FailureKind, Printed
from stoker.protocol.to_pilot import StartLibrary
from stoker.units import show_bytes

_KINDS = {OVER_LIMIT: FailureKind.TIMEOUT, OVER_MEMORY: FailureKind.MEMORY}


def verdict(ordered: StartLibrary, note: Note | None, *, said: str, loading: bool, pilot: str) -> Failure:
    """The evidence: the process's own note, if it left one, and what TaskVine `said`."""
    kind = FailureKind.CONTEXT if loading else FailureKind.DIED
    doing = "while it loaded" if loading else "in a call on"
    return Failure(
        kind=kind if note is None else _KINDS.get(note.reason, kind),
        message=f"lib-{ordered.library} ended {doing} {ordered.recipe.name}{_why(ordered, note)}; of its process "
        f"TaskVine says: {said}",
        pilot=pilot,
        library=ordered.library,
        tail=tail(note.log, start=note.start) if note is not None else "",
        log=note.log if note is not None else "",
        printed=Printed(note.log, note.start, 0) if note is not None and not loading else None,
    )


def _why(ordered: StartLibrary, note: Note | None) -> str:
    if note is None or not note.reason:
        return ""
    if note.reason == OVER_MEMORY:
        return f", which took more memory than the {show_bytes(ordered.recipe.needs.memory_bytes)} that it declares"
    return ", which did not stop when it was told to"
