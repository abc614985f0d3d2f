"""Take, wait for and check file locks (flock).

Some file systems have no locks: Lustre mounted without `flock`, NFS without its lock daemon. Without locks, `try_lock`
writes a file `NAME.holder`, which is valid while the process that it names lives, and `wait_for_lock` does nothing.
These weak locks are sufficient: a lease decides which manager runs a session, and a digest verifies each object.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.whole_files import write_whole

_SHOWN_CHARACTERS = 80

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
"""Error numbers of file systems that do not support locks."""


class LockHolder(msgspec.Struct, frozen=True):
    pid: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        command = " ".join([os.path.basename(self.words[0]), *self.words[1:]]) if self.words else ""
        shown = command if len(command) <= _SHOWN_CHARACTERS else f"{command[:_SHOWN_CHARACTERS]}…"
        return f"pid {self.pid} ({shown})" if shown else f"pid {self.pid}"


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return _try_lock_by_holder_file(descriptor)
    return True


def remove_holder_file(file: Path) -> None:
    _holder_file(file).unlink(missing_ok=True)


def wait_for_lock(descriptor: int, *, shared: bool = False) -> None:
    """Wait for the lock. Return at once on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def is_locked(file: Path, *, exclusively: bool = False) -> bool | None:
    """Return True if a process holds a lock on `file`, None if unknown. `exclusively`: ignore shared locks. The check
    itself takes a lock; with `exclusively`, concurrent checks ignore this lock.
    """
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, (fcntl.LOCK_SH if exclusively else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:  # another user owns the file, or the file system has no locks
        return _is_locked_by_holder_file(file) if error.errno in NO_LOCKS else None
    return False


# ---- without locks


class _HolderRecord(msgspec.Struct, frozen=True):
    """Content of a `.holder` file. `inode`: inode of the locked file."""

    machine: str
    pid: int
    started: int
    inode: int


def machine_id() -> str:
    """Return an identifier of this machine's boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def process_start_ticks(pid: int) -> int:
    """Return the start time of process `pid` in clock ticks since boot (0: not running)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _try_lock_by_holder_file(descriptor: int) -> bool:
    file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    me = _HolderRecord(machine_id(), os.getpid(), process_start_ticks(os.getpid()), os.fstat(descriptor).st_ino)
    there = _read_lock_holder(file)
    if there is not None and there != me and there.inode == me.inode and _is_holder_alive(there):
        return False
    try:
        write_whole(_holder_file(file), msgspec.json.encode(me))
    except OSError:  # no process can write in this folder, so no other process has the lock
        return True
    return _read_lock_holder(file) == me


def _is_locked_by_holder_file(file: Path) -> bool | None:
    there = _read_lock_holder(file)
    try:
        return None if there is None else there.inode == file.stat().st_ino and _is_holder_alive(there)
    except OSError:
        return None


def _is_holder_alive(holder: _HolderRecord) -> bool:
    return holder.machine == machine_id() and process_start_ticks(holder.pid) == holder.started


def _holder_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.holder")


def _read_lock_holder(file: Path) -> _HolderRecord | None:
    try:
        return msgspec.json.decode(_holder_file(file).read_bytes(), type=_HolderRecord)
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def find_lock_holders(file: Path) -> list[LockHolder]:
    """Return this user's processes that lock a file (proc_pid_fdinfo(5)). Slow: it reads /proc for every process."""
    name, found = os.path.realpath(file), []
    for process in sorted((each for each in Path("/proc").iterdir() if each.name.isdigit()), key=lambda p: int(p.name)):
        with suppress(OSError):  # the process has ended, or another user owns it
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):  # the descriptor was closed
                    if os.readlink(process / "fd" / descriptor) != name:
                        continue
                    facts = (process / "fdinfo" / descriptor).read_text().splitlines()
                    if any(line.startswith("lock:") and " FLOCK " in line for line in facts):
                        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                        found.append(LockHolder(int(process.name), tuple(words)))
                        break
    return found
