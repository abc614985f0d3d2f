"""What the manager does about an event on which the core raises: it refuses the event and restarts from the journal."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core.clients import refusal_of
from stoker.manager.core.events import Event
from stoker.manager.live.raised import raised

MOST_FAILURES, FAILURES_S = 20, 600.0
"""The session ends after `MOST_FAILURES` failures within `FAILURES_S`, and then no refusal is written."""
_LONGEST_REASON = 500


class CoreFailedError(Exception):
    """The core raised on this event; a refusal replaces the event in the journal."""


def refusal_after(error: Exception, event: Event, *, failed_at: Iterable[float], now: float) -> Event | None:
    """The refusal to write to the journal in place of the event; None if the core has failed too often. `failed_at`:
    when it failed before."""
    if sum(now - at < FAILURES_S for at in failed_at) >= MOST_FAILURES:
        return None
    lines = raised(error)
    where = f" ({lines[0].strip()})" if lines else ""
    return refusal_of(event, f"{type(error).__name__}: {error}{where}"[:_LONGEST_REASON])
