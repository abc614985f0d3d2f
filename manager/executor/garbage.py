"""Python's garbage collector while a session is loaded.

A hundred thousand futures are a hundred thousand containers that are no garbage; the collector looks through all of
them again and again, for half of the client's time. While any executor is started, the youngest generation is
collected at 50,000 new containers instead of 700 (and the older ones as seldom as before, relative to it). Memory
in cycles is freed a little later, nothing else changes, and the last executor that ends puts back what it found.
"""

from __future__ import annotations

import gc
import threading

THRESHOLDS = (50_000, 20, 50)

_lock = threading.Lock()
_calm = 0
_before: tuple[int, int, int] = gc.get_threshold()


def calm() -> None:
    """Collect less often, until `restore` was called as often as this."""
    global _calm, _before
    with _lock:
        if _calm == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < THRESHOLDS[0]:  # a program that has chosen less, or none, keeps it
                gc.set_threshold(*THRESHOLDS)
        _calm += 1


def restore() -> None:
    """Undo one `calm`."""
    global _calm
    with _lock:
        if _calm > 0:
            _calm -= 1
            if _calm == 0 and gc.get_threshold() == THRESHOLDS:
                gc.set_threshold(*_before)
