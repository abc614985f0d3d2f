"""The pilot's private folder on local disk: made closed, removed at the end, and swept if a pilot was killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from stoker import locks
from stoker.errors import SessionError
from stoker.folders import refuse_odd_path
from stoker.pilot.starter.place import own_folder

_LOCK = "alive"


def base_folder(given: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's pilots and caches lie on this host: `given`, where variables are read, else below the
    job's or the system's scratch.

    Raises SessionError if other users have made it, under each of its names.
    """
    given = os.path.expandvars(given)
    if given.startswith("$"):
        raise SessionError(f"this node sets no {given}, which --scratch names; give it a folder that is there")
    parent = given or environ.get("STOKER_SCRATCH") or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or "/tmp"
    first = Path(parent).absolute() / f"stoker-{os.getuid()}"
    refuse_odd_path(first, what="the scratch folder", advice="give [pilot] scratch, or STOKER_SCRATCH, another one")
    try:
        base = own_folder(first)
    except OSError as error:
        raise SessionError(
            f"no scratch folder could be made at {first}: {error}; give [pilot] scratch (or --scratch) another one"
        ) from error
    if base is None:
        raise SessionError(
            f"{first} belongs to somebody else; give [pilot] scratch (or --scratch) a folder of your own"
        )
    return base


class Scratch:
    """One pilot's folder. It is locked while the pilot lives, so that others know a dead one's by trying."""

    def __init__(self, base: Path, *, pilot: str) -> None:
        with (base / _LOCK).open("ab") as turn:  # nobody sweeps while a folder is there and its lock is not
            locks.wait(turn.fileno())
            sweep(base)
            self.path = base / f"pilot-{pilot}"
            self.path.mkdir(mode=0o700)
            # While it is open, its inode's number is not given to a folder that somebody makes in its place.
            self._pinned = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            locks.take(self._pinned)  # in case somebody removes the file with the other lock
            self._is = _identity(self.path)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            locks.take(self._lock)

    def fault(self) -> str:
        """What has become of the folder; empty while it is there. A batch system may clear it under a living pilot."""
        try:
            same = _identity(self.path) == self._is
        except OSError as error:
            return f"its scratch folder {self.path} is gone: {error.strerror}"
        return "" if same else f"its scratch folder {self.path} was removed while it ran"

    def library(self, number: int) -> Path:
        """A library's folder, made if need be. Raises OSError."""
        folder = self.path / f"lib-{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def remove_library(self, number: int) -> None:
        """Remove a library's folder."""
        shutil.rmtree(self.path / f"lib-{number}", ignore_errors=True)

    def remove(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        locks.forget(self.path)
        os.close(self._lock)
        os.close(self._pinned)


def _identity(folder: Path) -> tuple[int, int]:
    facts = folder.stat()
    return facts.st_dev, facts.st_ino


def sweep(base: Path) -> None:
    """Remove folders of pilots that died without a word.

    One has no lock file if its pilot found no room for it, or was killed while it removed the folder."""
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
