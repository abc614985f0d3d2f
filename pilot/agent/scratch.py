"""The scratch folder of the pilot, and the batch system's process that started the pilot (`ParentProcess`).

If HTCondor's starter or Slurm's slurmstepd is killed, the pilot keeps running on resources that another job may get.
The kernel then gives the pilot another parent process, which `ParentProcess` detects.
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


def base_folder(configured: str = "") -> Path:
    """Return the folder with this user's pilot folders and object cache on this host."""
    try:
        first = place.scratch_path(configured)
        refuse_non_utf8_path(first, what="the scratch folder", advice=place.OTHER_SCRATCH_ADVICE)
        return place.base_folder(configured)
    except place.StartError as error:
        raise SessionError(str(error)) from error


class Scratch:
    """The folder of one pilot, locked while the pilot runs."""

    def __init__(self, base: Path, *, pilot: str) -> None:
        with (base / _LOCK).open("ab") as turn:  # other pilots must not remove the new folder before it is locked
            locks.wait_for_lock(turn.fileno())
            remove_folders_of_dead_pilots(base)
            self.path = base / f"pilot-{pilot}"
            self.path.mkdir(mode=0o700)
            # Keep the folder open, so that no new folder gets its inode number.
            self._pinned = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            locks.try_lock(self._pinned)  # a second lock, because a cleanup job may remove the lock file
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            locks.try_lock(self._lock)

    def describe_fault(self) -> str:
        """Return why the folder is unusable, or ""."""
        try:
            same = os.path.samestat(self.path.stat(), os.fstat(self._pinned))
        except OSError as error:
            return f"its scratch folder {self.path} is gone: {error.strerror}"
        return "" if same else f"its scratch folder {self.path} was removed while it ran"

    def make_library_folder(self, number: int) -> Path:
        """Return the folder of a library; create it if missing. Raises OSError."""
        folder = self.path / f"lib-{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        locks.remove_holder_file(self.path)
        os.close(self._lock)
        os.close(self._pinned)


def remove_folders_of_dead_pilots(base: Path) -> None:
    for folder in base.glob("pilot-*"):
        with suppress(OSError):
            try:
                lock = os.open(folder / _LOCK, os.O_RDONLY)
            except FileNotFoundError:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if locks.try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
                    locks.remove_holder_file(folder)
            finally:
                os.close(lock)


# ---- the parent process

_INIT = 1


class ParentProcess:
    """The process that started the pilot. `ends_with_parent`: True if the batch job ends with this process."""

    def __init__(self, *, ends_with_parent: bool) -> None:
        self.pid = os.getppid()
        self._is_watched = ends_with_parent and self.pid > _INIT
        self._name = _process_name(self.pid) if self._is_watched else ""

    def describe_fault(self) -> str:
        """Return a message if a watched parent has ended, or ""."""
        if not self._is_watched or os.getppid() == self.pid:
            return ""
        return f"its parent, {self._name} (process {self.pid}), has ended, so its batch job has ended too"


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "a process"
    except OSError:
        return "a process"
