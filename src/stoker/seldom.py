"""Log lines that a stranger can provoke are limited: a neighbour must not fill a disk. Standard library alone."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

_SUBJECTS = 256


class SeldomLog:
    """Warns at most once in `every_s` about a subject, and at most `most` times in `every_s` about all of them.

    A line says how many lines about the same subject were left out before it. Any thread may use it.
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        every_s: float = 10.0,
        most: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._most = most
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By subject: when it was last written about, and how many lines were left out since."""
        self._window_began = -every_s
        self._written = 0

    def warning(self, subject: str, text: str) -> bool:
        """Write `text` unless the log has enough of this subject; returns True if it was written."""
        now = self._clock()
        if now - self._window_began >= self._every_s:
            self._window_began, self._written = now, 0
        last, left_out = self._seen.get(subject, (-self._every_s, 0))
        if now - last < self._every_s or self._written >= self._most:
            self._seen[subject] = (last, left_out + 1)
            self._forget_old()
            return False
        self._written += 1
        self._seen[subject] = (now, 0)
        self._seen.move_to_end(subject)
        self._forget_old()
        more = f" (and {left_out} more such lines)" if left_out else ""
        self._log.warning("%s%s", text, more)
        return True

    def _forget_old(self) -> None:
        while len(self._seen) > _SUBJECTS:
            self._seen.popitem(last=False)
