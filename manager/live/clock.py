"""The manager's clock: seconds since the epoch when it started, and from then on what really passes.

Times in the journal and in stories are to mean the same after a restart, so they count from the epoch. But a wall clock
is set forward and back while a session lasts, and an hour that nobody lived through must not make every pilot silent
for an hour, nor stop every timer for one. So the wall clock is read once.
"""

from __future__ import annotations

import time


class Clock:
    """`not_before`: the last time that the journal knows; a wall clock that went back while nobody ran starts there."""

    def __init__(self, *, not_before: float = 0.0) -> None:
        self._ahead = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch; never goes back."""
        return self._ahead + time.monotonic()
