"""The lease of a session's manager: a small file that names the one process that may run the session.

Locks and clocks are not reliable across hosts. So the holder replaces the file every few seconds, with a new counter.

- On the holder's machine, the holder's process id and start time show whether it is dead. A dead holder is replaced at
  once.
- On another machine, the holder counts as dead if the file has not changed for `PATIENCE_S` of the local clock. If two
  managers decide this together, both managers write and wait. The manager whose token is in the file afterwards wins.
- After a freeze, a holder handles no frame until it has read its own token in the lease file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker import locks
from stoker.decoding import UNREADABLE, read_json
from stoker.errors import SessionError
from stoker.whole_files import draft_file, write_all

log = logging.getLogger("stoker.manager")

TAKEN_OVER = 3
"""Exit status of a manager that another manager has replaced."""
RENEW_S = 3.0
PATIENCE_S = 30.0
"""Seconds without a renewal after which a manager on another machine may take the lease."""
CONFIRMED_FOR_S = 15.0
"""A holder that has not confirmed its own token in the lease file for these seconds handles no more frames."""
_POLL_S = 0.02
SETTLE_S = 2.0
ROOM_S = 60.0
_ROOM_POLL_S = 0.25
_MOST_BYTES = 1 << 16

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_NO_NEW_FILE_ERRORS = (errno.EMFILE, errno.ENFILE, *_DISK_FULL_ERRORS)
"""Errors after which the open lease file is overwritten, because no new file can be created."""


class LeaseTakenError(SessionError):
    """Another manager runs the session."""


class NoDiskSpaceError(SessionError):
    pass


class LeaseHolder(msgspec.Struct, frozen=True):
    """The process that may run the session. `machine`: equal for processes that can see each other's process ids.
    `started`: start of the process, in clock ticks since boot. `over`: why the session ended. `unwritten`: why the
    journal lacks its last records.
    """

    host: str
    machine: str
    pid: int
    started: int
    token: str
    counter: int = 0
    over: str = ""
    unwritten: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Lease:
    """The lease of this manager. `predecessor`: the holder in the earlier lease file, or None."""

    def __init__(self, path: Path, holder: LeaseHolder, *, predecessor: LeaseHolder | None, renew_s: float) -> None:
        self.path = path
        self.holder = holder
        self.predecessor = predecessor
        self.on_renewed: Callable[[], None] = lambda: None
        """Called in the lease's thread after each renewal; may raise OSError."""
        self._renew_s = renew_s
        self._confirmed_at = _boot_clock_s()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = -1
        """Descriptor of the open lease file, which is overwritten if no new file can be created."""

    @property
    def has_remote_predecessor(self) -> bool:
        return self.predecessor is not None and self.predecessor.machine != self.holder.machine

    def start_renewing(self, on_lost: Callable[[LeaseHolder | None], None]) -> None:
        """Renew the lease in a thread. `on_lost` gets a new holder, or None if the folder is gone."""
        self._thread = threading.Thread(
            target=self._renew_until_stopped, args=(on_lost,), name="stoker-lease", daemon=True
        )
        self._thread.start()

    def wait_until_lease_confirmed(self) -> None:
        if _boot_clock_s() - self._confirmed_at <= CONFIRMED_FOR_S:
            return
        log.warning("this manager or its file system was frozen; it waits until its lease is confirmed")
        while _boot_clock_s() - self._confirmed_at > CONFIRMED_FOR_S and not self._stop.is_set():
            time.sleep(_POLL_S)

    def release(self, *, over: str = "", unwritten: str = "") -> None:
        """Release the lease. `over`: why the session ended, so that no other manager starts."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            there = read_lease(self.path)
            if there is None or there.token != self.holder.token:
                return
            if not over:
                self.path.unlink()
                return
            holder = msgspec.structs.replace(self.holder, over=over, unwritten=unwritten)
            try:
                os.close(_write_lease_file(self.path, holder))
            except OSError as error:
                if error.errno not in _NO_NEW_FILE_ERRORS or self._file < 0:
                    raise
                self._write_in_place(holder)
        except (OSError, SessionError) as error:
            log.warning("the lease %s could not be released: %s", self.path, error)
        finally:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _renew_until_stopped(self, on_lost: Callable[[LeaseHolder | None], None]) -> None:
        while not self._stop.wait(self._renew_s):
            try:
                taken_by = self._renew_once()
            except FileNotFoundError:
                on_lost(None)
                return
            except (OSError, SessionError) as error:  # the file system may be absent or full temporarily
                log.warning("the lease %s could not be renewed: %s", self.path, error)
                continue
            if taken_by is not None:
                on_lost(taken_by)
                return

    def _renew_once(self) -> LeaseHolder | None:
        try:
            try:
                there = read_lease(self.path)
            except SessionError:  # a damaged file names no other manager, so this lease is still valid
                self._confirmed_at = _boot_clock_s()
                raise
            if there is not None and there.token != self.holder.token:
                return there
            self._confirmed_at = _boot_clock_s()
            self.holder = msgspec.structs.replace(self.holder, counter=self.holder.counter + 1)
            self.write_new_file()
        except OSError as error:
            if error.errno not in _NO_NEW_FILE_ERRORS or self._file < 0:
                raise
            self._write_in_place(msgspec.structs.replace(self.holder, counter=self.holder.counter + 1))
            self._confirmed_at = _boot_clock_s()
        self.on_renewed()
        return None

    def write_new_file(self) -> None:
        """Write the lease to a new file, and keep it open. Raises OSError."""
        before, self._file = self._file, _write_lease_file(self.path, self.holder)
        if before >= 0:
            os.close(before)

    def overwrite_dead_lease(self) -> bool:
        """Overwrite the lease file of a dead holder, even on a full disk. Return False on failure."""
        if self.predecessor is None or is_holder_alive(self.predecessor) is not False:
            return False
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            _overwrite_lease_file(file, self.path, msgspec.json.encode(self.holder), before=os.read(file, _MOST_BYTES))
        except OSError:
            os.close(file)
            return False
        self._file = file
        return True

    def _write_in_place(self, holder: LeaseHolder) -> None:
        """Renew the lease in its open file. On OSError the file is unchanged."""
        if not os.path.samestat(os.fstat(self._file), os.stat(self.path)):
            # Another holder wrote its lease. Close this file, so that a descriptor is free to read the new lease.
            os.close(self._file)
            self._file = -1
            raise OSError(errno.EMFILE, "another file is at its path, and no new file can be opened or written")
        _overwrite_lease_file(
            self._file, self.path, msgspec.json.encode(holder), before=msgspec.json.encode(self.holder)
        )
        self.holder = holder
        os.fsync(self._file)


def _overwrite_lease_file(file: int, path: Path, data: bytes, *, before: bytes) -> None:
    """Overwrite an open lease. If this fails or another file is at `path`, restore the old data and raise OSError."""
    try:
        if os.pwrite(file, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, len(data))
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise OSError(errno.ESTALE, "another file is at its path")
    except OSError:
        with contextlib.suppress(OSError):
            os.pwrite(file, before, 0)
            os.ftruncate(file, len(before))
        raise


def _boot_clock_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def take_lease(
    path: Path,
    *,
    patience_s: float = PATIENCE_S,
    settle_s: float = SETTLE_S,
    renew_s: float = RENEW_S,
    room_s: float = 0.0,
) -> Lease:
    """Take a lease. Wait up to `patience_s` for a renewal by a manager on another machine, and up to `room_s` for disk
    space. Raises SessionError if the session has a live manager or is over, NoDiskSpaceError if the disk stays full.
    """
    with _start_lock(path):
        before = read_lease(path)
        if before is not None:
            _wait_until_free(path, before, patience_s=patience_s)
        pid = os.getpid()
        mine = LeaseHolder(
            socket.gethostname(),
            locks.machine_id(),
            pid,
            started=locks.process_start_ticks(pid),
            token=secrets.token_hex(8),
        )
        lease = Lease(path, mine, predecessor=before, renew_s=renew_s)
        _write_initial_lease(lease, room_s=room_s)
        if lease.has_remote_predecessor:
            time.sleep(settle_s)
            there = read_lease(path)
            if there is None or there.token != lease.holder.token:
                raise _taken_error(path, there)
    return lease


def _write_initial_lease(lease: Lease, *, room_s: float) -> None:
    path, until, is_said = lease.path, time.monotonic() + room_s, False
    while True:
        try:
            lease.write_new_file()
            return
        except OSError as error:
            text = f"the lease {path} cannot be written: {error.strerror}; make room there"
            if error.errno not in _DISK_FULL_ERRORS:
                raise SessionError(text) from error
            if lease.overwrite_dead_lease():
                log.warning("%s: the manager overwrites the file of the dead manager (%s)", text, lease.predecessor)
                return
            if time.monotonic() >= until:
                raise NoDiskSpaceError(text) from error
        if not is_said:
            log.warning("%s: the manager waits for disk space", text)
            is_said = True
        time.sleep(_ROOM_POLL_S)
        there = read_lease(path)
        if there != lease.predecessor:  # a manager on another machine was faster
            raise _taken_error(path, there)


def read_lease(path: Path) -> LeaseHolder | None:
    """Return the holder, or None without a lease. Raises OSError, or SessionError for a damaged lease."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=LeaseHolder)
    except UNREADABLE as error:
        raise SessionError(f"{path} is damaged: {error}; if no manager of the session runs, remove it") from error


def why_journal_is_incomplete(path: Path) -> str:
    holder = read_lease_or_none(path)
    return holder.unwritten if holder is not None else ""


def read_lease_or_none(path: Path) -> LeaseHolder | None:
    return read_json(path, LeaseHolder)


def is_holder_alive(holder: LeaseHolder) -> bool | None:
    """True if the holder's process runs; None if it is on another machine."""
    if holder.over:
        return False
    if holder.machine != locks.machine_id():
        return None
    return locks.process_start_ticks(holder.pid) == holder.started


def copy_journal(journal: Path) -> None:
    """Replace the journal by a copy, so that late writes of the old manager are never read."""
    if journal.exists():
        # If this manager is killed, the next manager finds the draft by its suffix and removes it.
        with draft_file(journal, draft=journal.with_name(f"{journal.name}.{secrets.token_hex(4)}.draft")) as draft:
            shutil.copyfile(journal, draft)
            draft.chmod(0o600)


def _wait_until_free(path: Path, before: LeaseHolder, *, patience_s: float) -> None:
    if before.over:
        raise SessionError(f"session folder {path.parent}: the session is over ({before.over}); start a new one")
    alive = is_holder_alive(before)
    if alive:
        raise _taken_error(path, before)
    if alive is None:
        log.info("waiting %.0f s for a lease renewal by the manager that was %s", patience_s, before)
        until = time.monotonic() + patience_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
            there = read_lease(path)
            if there is None:
                return
            if there != before:
                raise _taken_error(path, there)


def _taken_error(path: Path, holder: LeaseHolder | None) -> LeaseTakenError:
    who = f" ({holder})" if holder else ""
    return LeaseTakenError(f"{path.parent} already has a manager{who}; a session can have only one manager")


@contextlib.contextmanager
def _start_lock(path: Path) -> Iterator[None]:
    """Allow one manager start at a time on one machine."""
    with open(path.with_suffix(".lock"), "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_lease_file(path: Path, holder: LeaseHolder) -> int:
    file = -1
    try:
        with draft_file(path, draft=path.with_suffix(f".{holder.token}")) as draft:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            write_all(file, msgspec.json.encode(holder))
    except BaseException:
        if file >= 0:
            os.close(file)
        raise
    return file
