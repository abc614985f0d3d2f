"""Marks of objects whose content is on the disk for good.

A crash of the machine soon after an object came could leave zeros in its place, of the right length and age. An object
without a mark is therefore brought again after a boot. Waiting for the disk takes longer than a small context takes to
load, and slows it down: one thread does it, half a second after an object has come.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stoker.pilot.cache import disk

log = logging.getLogger("stoker.pilot")

PAUSE_S = 0.5
"""Objects that came within so short a time are written out together, after it."""


class SafeMarks:
    """The marks of one cache, in a folder of their own. `while_same(place, look, action)` is the cache's: it calls
    `action` if the object at `place` still looks like that, and lets nobody change it meanwhile."""

    def __init__(self, folder: Path, while_same: Callable[[Path, str, Callable[[], None]], None]) -> None:
        self.folder = folder
        self._while_same = while_same
        self._lock = threading.Lock()
        self._fresh: list[Path] = []
        self._is_at_work = False

    def has(self, place: Path) -> bool:
        """True if the object at this place was on the disk before a crash could come."""
        return (self.folder / place.name).exists()

    def make_soon(self, place: Path) -> None:
        """Write an object out and mark it, in the background."""
        with self._lock:
            self._fresh.append(place)
            if self._is_at_work:
                return
            self._is_at_work = True
        try:
            threading.Thread(target=self._make, name="cache-safe", daemon=True).start()
        except RuntimeError as error:  # this user may have no more threads here
            with self._lock:
                self._fresh.clear()
                self._is_at_work = False
            log.debug("%s may not outlive a crash of this machine: %s", place, error)

    def remove(self, place: Path) -> None:
        """The object at this place goes, and its mark with it."""
        disk.delete(self.folder / place.name)

    def _make(self) -> None:
        while True:
            time.sleep(PAUSE_S)
            with self._lock:
                fresh, self._fresh = self._fresh, []
                if not fresh:
                    self._is_at_work = False
                    return
            for place in fresh:
                try:
                    look = disk.stat_signature(place)
                    disk.flush(place)
                    self._while_same(place, look, (self.folder / place.name).touch)
                except OSError as error:
                    log.debug("%s may not outlive a crash of this machine: %s", place, error)
