"""Folders on the scratch disk that are empty again after each call, without making one each time.

The change time of such a folder is set to a moment long past. A single `fstat` after a call tells whether a file was
made or removed in it, even within one tick of the kernel's clock.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from multiprocessing import process

_LONG_AGO_NS = 1_000_000_000
_LONGEST = 60
"""A socket below a folder with a longer path may have a path that is too long: `multiprocessing` adds 31 characters."""


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
        self._is = (0, 0, 0)
        self._changed_ns = 0
        self._open = -1
        self._was_open = (0, 0)
        self.clear()

    def is_touched(self) -> bool:
        """True if an entry of the folder was made or removed since it was cleared, or the folder itself."""
        try:
            facts = os.fstat(self._open)
        except OSError:  # a call has closed it
            return True
        return facts.st_mtime_ns != self._changed_ns or facts[1:4] != self._is

    @property
    def short_path(self) -> str:
        """A path of the folder for Unix sockets, whose paths have 107 characters at most. It holds in this process and
        its children, as long as this process lives."""
        if len(os.fsencode(self.path)) <= _LONGEST or self._open < 0:
            return self.path
        return f"/proc/{os.getpid()}/fd/{self._open}"

    def names(self) -> list[str]:
        """The names of what `clear` removes; none if the folder cannot be read."""
        try:
            return sorted(set(os.listdir(self.path)) - self._kept)
        except OSError:
            return []

    def keep(self) -> None:
        """Keep all that is in the folder now."""
        self._kept = frozenset(os.listdir(self.path))
        self._remember_state()

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
        self._remember_state()

    def _remember_state(self) -> None:
        os.utime(self.path, ns=(_LONG_AGO_NS, _LONG_AGO_NS))
        facts = os.stat(self.path)
        self._is = facts[1:4]  # inode, device, links: a slice costs less than three attributes
        self._changed_ns = facts.st_mtime_ns
        self._reopen()

    def _reopen(self) -> None:
        """Have the folder open, by the same number as before. A number that a call has closed may be another file's by
        now, which stays open."""
        inode, device = self._is[:2]
        try:
            before = os.fstat(self._open)
        except OSError:
            before = None
        if before is not None and (before.st_ino, before.st_dev) == self._was_open:
            if self._was_open == (inode, device):
                return
        elif before is not None:
            self._open = -1
        try:
            number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # without a descriptor the folder counts as touched each time
            self._open = -1
            return
        if self._open >= 0 and number != self._open:
            os.dup2(number, self._open, inheritable=False)
            os.close(number)
        else:
            self._open = number
        self._was_open = (inode, device)


def clear_temporary(folder: ClearedFolder) -> None:
    """Empty a folder of temporary files, and have `multiprocessing` make its own in there anew. Raises OSError."""
    folder.clear()
    made = getattr(process.current_process(), "_config", {}).get("tempdir")
    if made is not None and not os.path.isdir(made):
        process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
