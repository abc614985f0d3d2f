"""A folder of its own for each call, without making one each time.

A slot's folder is used again as long as nothing happened in it: its change time is set to a moment long past, so a
single `stat(".")` after a call tells whether anything was made or removed in it (even within one tick of the kernel's
clock) and whether the call went elsewhere. If so the folder is cleared, or made anew, before the next call.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from contextlib import suppress

_LONG_AGO_NS = 1_000_000_000
_CLONE_FS = 0x200


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


class Sandbox:
    """The folder of one slot. The thread that runs the slot's calls stands in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is = (0, 0, 0, 0)
        self._make()

    def enter_own(self) -> None:
        """Give this thread a working folder of its own, apart from other threads', where the system allows it."""
        ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS)
        os.chdir(self.path)

    def visit(self, folder: str) -> None:
        """Run the next call in a folder that the user named (made if it is missing). Raises OSError."""
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)

    def restore(self) -> None:
        """After a call: be empty again, and be where the thread stands."""
        try:
            facts = os.stat(".")
            if (facts.st_ino, facts.st_dev, facts.st_mtime_ns, facts.st_nlink) == self._is:
                return
            facts = os.stat(self.path)
            if (facts.st_ino, facts.st_dev, facts.st_mtime_ns, facts.st_nlink) == self._is:
                os.chdir(self.path)
                return
        except OSError:
            pass
        self._make()

    def _make(self) -> None:
        try:
            with os.scandir(self.path) as listing:
                for entry in listing:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # what resists (no descriptor is free, another user's file) is put aside
                os.rename(self.path, f"{self.path}-{time.monotonic_ns()}")
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        os.chdir(self.path)
        os.utime(".", ns=(_LONG_AGO_NS, _LONG_AGO_NS))
        facts = os.stat(".")
        self._is = (facts.st_ino, facts.st_dev, facts.st_mtime_ns, facts.st_nlink)
