"""Reports of a `stoker.map` to the manager: its length and its progress.

The link's thread counts the results that come, also while the program is busy in its loop; the program's thread counts
the calls that it sends. A report leaves once a second at most, with the next frame.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import MapReport
from stoker.units import MOST_NUMBER

_EVERY_S = 1.0
_numbers = itertools.count()


class MapReports:
    """The reports of one map. `items`: its length, None if its input does not know; `tell` sends a report with the next
    frame."""

    def __init__(
        self,
        tell: Callable[[MapReport], None],
        *,
        name: str,
        context: str,
        items: int | None,
        batch_size: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._number = next(_numbers)
        self._name = name
        self._context = RecipeKey(context)
        self._items = None if items is None else min(items, MOST_NUMBER)
        self._size = batch_size or 1
        self._sent = self._ended = self._kept = 0
        """Calls sent, calls ended, and calls whose results an earlier run has kept."""
        self._told_kept = 0
        self._clock = clock
        self._told_at: float | None = None
        self._is_over = False

    def sent(self, calls: int) -> None:
        """Count calls that leave with the next frame."""
        self._sent += calls
        if self._told_kept != self._kept:  # results of earlier runs were found since: they took no time
            self._told_at = None
        self._report()

    def ended(self, calls: int) -> None:
        """Count calls that have ended."""
        self._ended += calls
        self._report()

    def kept(self) -> None:
        """Count a call whose result is in the map's file."""
        self._kept += 1
        self._report()

    def close(self) -> None:
        """Report the end of the map."""
        if not self._is_over:
            self._is_over = True
            if self._told_at is not None:
                self._tell(self._now())

    def _report(self) -> None:
        now = self._clock()
        if self._is_over or (self._told_at is not None and now - self._told_at < _EVERY_S):
            return
        self._told_at, self._told_kept = now, self._kept
        self._tell(self._now())

    def _now(self) -> MapReport:
        total, done, kept = self._items, self._size * (self._kept + self._ended), self._size * self._kept
        unsent = -1
        if total is not None:
            done, kept = min(done, total), min(kept, total)
            unsent = max(0, -(-total // self._size) - self._sent - self._kept)
        return MapReport(
            self._number,
            self._name,
            self._context,
            total=-1 if total is None else total,
            done=done,
            kept=kept,
            unsent=unsent,
            over=self._is_over,
        )
