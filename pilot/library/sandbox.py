"""Folders on the scratch disk that are empty again after each call, without making one each time.

The change time of such a folder is set to a moment long past. A single `fstat` after a call tells whether a file was
made or removed in it, even within one tick of the kernel's clock.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress

_LONG_AGO_NS = 1_000_000_000


class ScratchGuard:
    """The scratch folder of the pilot, which a batch system may clear under a living one. Whatever then fails in a call
    or a loader (a file that cannot be made, a module that cannot be imported) is not its fault."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._is = _identity(folder)
        self._pin(folder)

    def _pin(self, folder: str) -> None:
        """Keep it open, so that its inode's number is not given to a folder that is made in its place."""
        with suppress(OSError):
            os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def is_gone(self) -> bool:
        """True if it was removed, also before this was made; made again by another hand it is another."""
        return self._is is None or _identity(self._folder) != self._is


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(folder)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class ClearedFolder:
    """A folder that `clear` empties, but for what was in it when `keep` was called. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._kept: frozenset[str] = frozenset()
        self._is = (0, 0, 0, 0)
        self._open = -1
        self.clear()

    @property
    def is_touched(self) -> bool:
        """True if an entry of the folder was made or removed since it was cleared, or the folder itself."""
        try:
            facts = os.fstat(self._open)
        except OSError:  # a call has closed it
            return True
        return (facts.st_ino, facts.st_dev, facts.st_mtime_ns, facts.st_nlink) != self._is

    def names(self) -> list[str]:
        """The names of what `clear` removes; none if the folder cannot be read."""
        try:
            return sorted(set(os.listdir(self.path)) - self._kept)
        except OSError:
            return []

    def keep(self) -> None:
        """Keep all that is in the folder now."""
        self._kept = frozenset(os.listdir(self.path))
        self._look()

    def clear(self) -> None:
        """Empty the folder; make it if it is gone."""
        try:
            with os.scandir(self.path) as listing:
                for entry in listing:
                    if entry.name in self._kept:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)
        except OSError:
            self._kept = frozenset()
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # what resists (no descriptor is free, another user's file) is put aside
                os.rename(self.path, f"{self.path}-{time.monotonic_ns()}")
            os.mkdir(self.path, mode=0o700)
        self._look()

    def _look(self) -> None:
        os.utime(self.path, ns=(_LONG_AGO_NS, _LONG_AGO_NS))
        facts = os.stat(self.path)
        self._is = (facts.st_ino, facts.st_dev, facts.st_mtime_ns, facts.st_nlink)
        self._reopen(facts.st_dev, facts.st_ino)

    def _reopen(self, device: int, inode: int) -> None:
        """Have the folder open. A descriptor that a call has closed may be another file's by now: it stays open."""
        with suppress(OSError):
            facts = os.fstat(self._open)
            if (facts.st_dev, facts.st_ino) == (device, inode):
                return
        self._open = -1
        with suppress(OSError):  # without a descriptor the folder counts as touched each time
            self._open = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
