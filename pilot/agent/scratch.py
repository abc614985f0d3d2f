"""The scratch folder of the pilot, and the batch system's process that started the pilot (`Parent`).

If HTCondor's starter or Slurm's slurmstepd is killed, the pilot keeps running on resources that another job may get.
The kernel then gives the pilot another parent process, which `Parent` detects.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from stoker import locks
from stoker.errors import SessionError
from stoker.folders import refuse_non_utf8_path
from stoker.pilot.starter import place

# ---- the scratch folder

_LOCK = "alive"


def base_folder(given: str = "") -> Path:
    """Return the folder with this user's pilot folders and object cache on this host."""
    try:
        first = place.scratch_path(given)
        refuse_non_utf8_path(first, what="the scratch folder", advice=place.OTHER_SCRATCH)
        return place.base_folder(given)
    except place.StartError as error:
        raise SessionError(str(error)) from error


class Scratch:
    """The folder of one pilot, locked while the pilot runs."""

    def __init__(self, base: Path, *, pilot: str) -> None:
        with (base / _LOCK).open("ab") as turn:  # until the new folder is locked, no other pilot may remove folders
            locks.wait(turn.fileno())
            sweep(base)
            self.path = base / f"pilot-{pilot}"
            self.path.mkdir(mode=0o700)
            # Keep the folder open, so that no new folder gets its inode number.
            self._pinned = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            locks.take(self._pinned)  # in case a cleanup job removes the file of the other lock
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            locks.take(self._lock)

    def fault(self) -> str:
        """Return why the folder is unusable, or ""."""
        try:
            same = os.path.samestat(self.path.stat(), os.fstat(self._pinned))
        except OSError as error:
            return f"its scratch folder {self.path} is gone: {error.strerror}"
        return "" if same else f"its scratch folder {self.path} was removed while it ran"

    def library(self, number: int) -> Path:
        """Return the folder of a library; create it if missing. Raises OSError."""
        folder = self.path / f"lib-{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        locks.forget(self.path)
        os.close(self._lock)
        os.close(self._pinned)


def sweep(base: Path) -> None:
    """Remove the folders of dead pilots."""
    for folder in base.glob("pilot-*"):
        with suppress(OSError):
            try:
                lock = os.open(folder / _LOCK, os.O_RDONLY)
            except FileNotFoundError:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if locks.take(lock):
                    shutil.rmtree(folder, ignore_errors=True)
                    locks.forget(folder)
            finally:
                os.close(lock)


# ---- the parent process

_INIT = 1


class Parent:
    """The process that started the pilot. `watched`: True if the batch job ends with this process."""

    def __init__(self, *, watched: bool) -> None:
        self.pid = os.getppid()
        self._watched = watched and self.pid > _INIT
        self._name = _name_of(self.pid) if self._watched else ""

    def fault(self) -> str:
        """Return a message if a watched parent has ended, or ""."""
        if not self._watched or os.getppid() == self.pid:
            return ""
        return f"its parent, {self._name} (process {self.pid}), has ended, so its batch job has ended too"


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "a process"
    except OSError:
        return "a process"
