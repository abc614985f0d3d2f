"""How often a manager that dies is started again, and after which pause.

A manager that does something between its deaths is worth its restarts, however many: it says so once in its life, when
the first call has ended (`RestartProgress`). Deaths without that are counted. The first one costs no pause, since most
are single kills; then the pause grows, because what is wrong (a full disk, a file system that is away) may pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

MOST_DEATHS = 5
WINDOW_S = 60.0
"""So many deaths without progress within the window, and the manager is left alone."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 8.0
"""The pause before the second restart in a row; it doubles up to the longest."""


class RestartProgress:
    """The manager's side: a file that is touched once in a manager's life."""

    def __init__(self, path: Path, *, done: int) -> None:
        self._path = path
        self._done_before = done
        self._is_said = False

    def report_first_end(self, done: int) -> None:
        """Note that a call has ended under this manager, once. `done`: how many have ended in all."""
        if self._is_said or done <= self._done_before:
            return
        self._is_said = True
        try:
            self._path.touch(mode=0o600)
        except OSError:  # no room, or no file system: the keeper believes that nothing was done
            pass


class Restarts:
    """The keeper's side: what to do about each death. `clock` is in seconds and does not jump."""

    def __init__(self, progress: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._before = self._seen()

    def started(self) -> None:
        """A manager is about to start."""
        self._before = self._seen()

    def died(self) -> float | None:
        """It has died. Seconds until the next start; None if it is to be left alone."""
        now = self._clock()
        if self._seen() != self._before:
            self._deaths.clear()
        self._deaths.append(now)
        recent = sum(now - at < WINDOW_S for at in self._deaths)
        if recent >= MOST_DEATHS:
            return None
        return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (recent - 2)) if recent > 1 else 0.0

    def _seen(self) -> int:
        try:
            return self._progress.stat().st_mtime_ns
        except OSError:
            return 0


def after(pause_s: float) -> str:
    """` in 2 s`, for people; nothing for a restart at once."""
    return f" in {pause_s:g} s" if pause_s else ""
