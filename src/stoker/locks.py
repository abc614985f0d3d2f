"""Locks of files (flock): taken if they are free, and asked about by somebody who does not want them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

_SHOWN_CHARACTERS = 80


class Holder(msgspec.Struct, frozen=True):
    """A process that holds a lock, and what it runs."""

    pid: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        command = " ".join([os.path.basename(self.words[0]), *self.words[1:]]) if self.words else ""
        shown = command if len(command) <= _SHOWN_CHARACTERS else f"{command[:_SHOWN_CHARACTERS]}…"
        return f"pid {self.pid} ({shown})" if shown else f"pid {self.pid}"


def take(descriptor: int) -> bool:
    """Lock an open file for oneself, if nobody else has; it lasts until the file is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(file: Path, *, exclusively: bool = False) -> bool | None:
    """Whether somebody holds a lock on a file, or an exclusive one; None where that cannot be told.

    It is asked by taking the lock for a moment: `exclusively`, several can ask at once and none finds another.
    """
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, (fcntl.LOCK_SH if exclusively else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file that is not ours, a file system without locks
        return None
    return False


def holders(file: Path) -> list[Holder]:
    """Processes that hold a lock on a file, those that inherited it included; it lasts until the last of them is gone.

    Only this user's on this machine can be seen: an empty list does not say that the file is free. It takes a look at
    every process, so it is for when something has to be explained.
    """
    name = os.path.realpath(file)
    pids = sorted(int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return [Holder(pid, _words(pid)) for pid in pids if _holds(pid, name)]


def _holds(pid: int, name: str) -> bool:
    """Whether a process has this file open, and a lock on it."""
    try:
        return any(_is_lock(pid, descriptor, name) for descriptor in os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it ended meanwhile, or is somebody else's
        return False


def _is_lock(pid: int, descriptor: str, name: str) -> bool:
    """The kernel shows a lock with each descriptor that it belongs to, whoever took it (proc_pid_fdinfo(5))."""
    try:
        if os.readlink(f"/proc/{pid}/fd/{descriptor}") != name:
            return False
        facts = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
    except OSError:  # it was closed meanwhile
        return False
    return any(line.startswith("lock:") and " FLOCK " in line for line in facts.splitlines())


def _words(pid: int) -> tuple[str, ...]:
    try:
        return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    except OSError:
        return ()
