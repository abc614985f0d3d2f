"""How an engine asks for its turn on devices that it shares with other libraries: the shape of who grants it.

The pilot's libraries keep the turns (`stoker.pilot.library.library_turns`); a library process offers them here before
its context loads. Without one, as outside of a library, an engine computes whenever it likes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class EngineTurns(Protocol):
    """The turns of one engine. Used by one thread."""

    @property
    def shared(self) -> bool:
        """Whether another library has these devices too. Costs no system call."""

    def begin(self, *, due_at: float, step_s: float) -> None:
        """Wait for a turn and hold it. `due_at`: when the most urgent token is due, of `time.monotonic`; `step_s`:
        how long the iteration probably takes, 0 if nobody knows."""

    def end(self) -> None:
        """No iteration is wanted for now."""


_make: Callable[[], EngineTurns] | None = None


def offer_turns(make: Callable[[], EngineTurns] | None) -> None:
    """From now on each engine of this process gets turns that this makes; None: no more."""
    global _make
    _make = make


def new_turns() -> EngineTurns | None:
    """Turns for one engine; None where nobody offers any, or they cannot be had."""
    try:
        return _make() if _make is not None else None
    except OSError as error:
        log.warning("this engine computes without turns: %s", error)
        return None
