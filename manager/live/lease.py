"""One session has one manager: what a second one says, and how it ends.

The lease of a session's manager: a small file that says who runs the session, so that nobody else does.

A cluster has several login nodes that see one session folder. Locks are not trusted across hosts (some network file
systems grant them to everybody), nor are clocks: a file's age says nothing to a host whose clock differs. So the holder
changes the file every few seconds, a counter in it, by atomic rename; and whoever wants the session looks.

- On the holder's own machine the process is asked for: its id, and when it was started, since ids come back. One that
  is dead is followed at once; one that lives keeps the session, however still it is.
- From another machine the holder counts as dead when the content of the file has not changed for `PATIENCE_S` of the
  watcher's own clock. Two watchers may come to that at the same moment: both write, wait, and the one whose name is in
  the file has it.
- A holder that was only frozen (a suspended login node, a file system that hung) reads the file before it renews it,
  finds another name there, and stops at once. Until it has read its own name again it takes no frame and says nothing
  (`wait_until_sure`). What it may have been writing goes into a journal that nobody reads: whoever follows a holder on
  another machine goes on with a copy of its journal.

The lease of a session that is over says so, and is never followed.
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
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.protocol.session import SessionFolder
from stoker.whole_files import draft_of, write_all

# ---- taken


TAKEN_OVER = 3
"""The exit status of a manager that found that another one runs its session."""


class TakenError(SessionError):
    """Another manager runs the session."""


# ---- lease


log = logging.getLogger("stoker.manager")

RENEW_S = 3.0
PATIENCE_S = 30.0
"""A lease that has not changed for so long, seen from another machine, is up."""
SURE_S = 15.0
"""A holder that has not read its own name for so long acts no more until it has: somebody may follow it soon."""
_POLL_S = 0.02
SETTLE_S = 2.0
"""How long one who follows on another machine waits for somebody who does the same."""
ROOM_S = 60.0
"""How long a manager that comes back waits for room to write its lease."""
_ROOM_POLL_S = 0.25
_MOST_BYTES = 1 << 16
"""No lease is longer."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_NEW_FILE = (errno.EMFILE, errno.ENFILE, *_NO_ROOM)
"""Without a descriptor, or without room on the disk, the lease is renewed in the file that is there."""


class LeaseHolder(msgspec.Struct, frozen=True):
    """The content of a lease. `machine` is the same for processes that can see each other's ids; `started` is in the
    kernel's ticks since boot. `over` says why the session has ended; empty while it has not. `unwritten`: why the last
    records of its journal are not written; empty if they are."""

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
    """A lease that is held, and renewed until it is released. `on_lost` hears, on a thread of its own, who has it now
    (None: the session folder is gone)."""

    def __init__(
        self, path: Path, holder: LeaseHolder, *, follows: LeaseHolder | None, renew_s: float = RENEW_S
    ) -> None:
        self.path = path
        self.holder = holder
        self.follows = follows
        """Who had it before, if that one did not end the session."""
        self._renew_s = renew_s
        self._sure_at = _clock()
        """When it was known last that nobody else has it."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = -1
        """The lease's file, open: by it the lease is renewed when no descriptor is left, or the disk is full."""
        self.renewed: Callable[[], None] = lambda: None
        """Called after each renewal, on the lease's thread. It may raise OSError."""

    @property
    def from_elsewhere(self) -> bool:
        """Whether the one before ran on another machine: it may be alive after all."""
        return self.follows is not None and self.follows.machine != self.holder.machine

    def keep(self, on_lost: Callable[[LeaseHolder | None], None]) -> None:
        """Renew it from now on."""
        self._thread = threading.Thread(target=self._renew, args=(on_lost,), name="stoker-lease", daemon=True)
        self._thread.start()

    def wait_until_sure(self) -> None:
        """Return at once while it is known that nobody else has the lease; else when that is known again."""
        if _clock() - self._sure_at <= SURE_S:
            return
        log.warning("this manager or its file system was frozen: it waits until it knows that the session is its own")
        while _clock() - self._sure_at > SURE_S and not self._stop.is_set():
            time.sleep(_POLL_S)

    def release(self, *, over: str = "", unwritten: str = "") -> None:
        """Release the lease. `over`: why the session has ended, if it has: no other manager starts then. `unwritten`:
        why the journal lacks its last records."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            there = read(self.path)
            if there is None or there.token != self.holder.token:
                return
            if over:
                self._say_over(msgspec.structs.replace(self.holder, over=over, unwritten=unwritten))
            else:
                self.path.unlink()
        except (OSError, SessionError) as error:
            log.warning("the lease %s could not be released: %s", self.path, error)
        finally:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _say_over(self, holder: LeaseHolder) -> None:
        """Write that the session is over; on a full disk into the file that is there. Raises OSError."""
        try:
            os.close(_write(self.path, holder))
        except OSError as error:
            if error.errno not in _NO_NEW_FILE or self._file < 0:
                raise
            self._write_in_place(holder)

    def _renew(self, on_lost: Callable[[LeaseHolder | None], None]) -> None:
        while not self._stop.wait(self._renew_s):
            try:
                taken_by = self._renew_once()
            except FileNotFoundError:
                on_lost(None)
                return
            except (OSError, SessionError) as error:  # a file system that is away, or full: it may come back
                log.warning("the lease %s could not be renewed: %s", self.path, error)
                continue
            if taken_by is not None:
                on_lost(taken_by)
                return

    def _renew_once(self) -> LeaseHolder | None:
        """Renew it; returns the holder that has it now, if that is another. Raises OSError, SessionError."""
        try:
            there = self._read()
            if there is not None and there.token != self.holder.token:
                return there
            self._sure_at = _clock()
            self.holder = msgspec.structs.replace(self.holder, counter=self.holder.counter + 1)
            self.write()
        except OSError as error:
            if error.errno not in _NO_NEW_FILE or self._file < 0:
                raise
            self._renew_in_place()
        self.renewed()
        return None

    def _read(self) -> LeaseHolder | None:
        try:
            return read(self.path)
        except SessionError:  # damaged: no other manager wrote that
            self._sure_at = _clock()
            raise

    def write(self) -> None:
        """Write the lease, and keep the new file open: no descriptor may be left at the next time. Raises OSError."""
        fresh = _write(self.path, self.holder)
        before, self._file = self._file, fresh
        if before >= 0:
            os.close(before)

    def write_over_the_dead(self) -> bool:
        """Write the lease into the file of a holder that is dead for certain, as a full disk allows. False if that
        cannot be. Starters on this machine follow each other, and one on another machine replaces the file."""
        if self.follows is None or is_alive(self.follows) is not False:
            return False
        data = msgspec.json.encode(self.holder)
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        before = os.read(file, _MOST_BYTES)
        try:
            if os.pwrite(file, data, 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(file, len(data))
            mine, there = os.fstat(file), os.stat(self.path)
            if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
                raise FileNotFoundError(errno.ENOENT, "another file is there")
        except OSError:
            with contextlib.suppress(OSError):
                os.pwrite(file, before, 0)
                os.ftruncate(file, len(before))
            os.close(file)
            return False
        self._file = file
        return True

    def _renew_in_place(self) -> None:
        """Renew it by the file that is open. Raises OSError."""
        self._write_in_place(msgspec.structs.replace(self.holder, counter=self.holder.counter + 1))
        self._sure_at = _clock()

    def _write_in_place(self, holder: LeaseHolder) -> None:
        """Write it into the file that is open. Raises OSError; the file is then as it was."""
        mine, there = os.fstat(self._file), os.stat(self.path)
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            # Another holder wrote a lease of its own: to read it takes a descriptor, and this one is of no more use.
            os.close(self._file)
            self._file = -1
            raise OSError(errno.EMFILE, "another file is there, and none can be opened or written")
        data = msgspec.json.encode(holder)  # never shorter than before: its counter grows, or a reason is added
        if os.pwrite(self._file, data, 0) < len(data):
            before = msgspec.json.encode(self.holder)
            os.pwrite(self._file, before, 0)
            os.ftruncate(self._file, len(before))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.holder = holder
        os.fsync(self._file)


def _clock() -> float:
    """Seconds, those included in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lease_file(folder: SessionFolder) -> Path:
    """Where a session's lease lies."""
    return folder.lease


class NoRoomError(SessionError):
    """The lease cannot be written, because its disk is full. That may pass."""


def take(
    path: Path,
    *,
    patience_s: float = PATIENCE_S,
    settle_s: float = SETTLE_S,
    renew_s: float = RENEW_S,
    room_s: float = 0.0,
) -> Lease:
    """Take the lease at `path`, as soon as nobody holds it.

    Waits up to `patience_s` for a holder on another machine that may be dead, and up to `room_s` for room on the disk.
    Raises SessionError when the session has a manager that lives, or is over, and NoRoomError.
    """
    with _one_at_a_time(path):
        before = read(path)
        if before is not None:
            _wait_until_free(path, before, patience_s=patience_s)
        lease = Lease(path, _myself(), follows=before, renew_s=renew_s)
        _write_first(lease, room_s=room_s)
        if lease.from_elsewhere:
            time.sleep(settle_s)
            there = read(path)
            if there is None or there.token != lease.holder.token:
                raise _taken(path, there)
    return lease


def _write_first(lease: Lease, *, room_s: float) -> None:
    """Write a lease for the first time, as soon as there is room. Raises SessionError."""
    path, until, is_said = lease.path, time.monotonic() + room_s, False
    while True:
        try:
            lease.write()
            return
        except OSError as error:
            text = f"the lease {path} cannot be written: {error.strerror}; make room there"
            if error.errno not in _NO_ROOM:
                raise SessionError(text) from error
            if lease.write_over_the_dead():
                log.warning("%s: the file of %s is written over", text, lease.follows)
                return
            if time.monotonic() >= until:
                raise NoRoomError(text) from error
        if not is_said:
            log.warning("%s: the manager begins as soon as it can", text)
            is_said = True
        time.sleep(_ROOM_POLL_S)
        there = read(path)
        if there != lease.follows:  # a manager on another machine was quicker
            raise _taken(path, there)


def read(path: Path) -> LeaseHolder | None:
    """Who holds the lease at `path`; None if nobody does. Raises SessionError for a file that is no lease, OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=LeaseHolder)
    except UNREADABLE as error:
        raise SessionError(f"{path} is damaged: {error}; if no manager of the session runs, remove it") from error


def unwritten(path: Path) -> str:
    """Why the last records of the journal of a session that is over are not written; empty if they are."""
    holder = read_if_whole(path)
    return holder.unwritten if holder is not None else ""


def read_if_whole(path: Path) -> LeaseHolder | None:
    """Who holds the lease at `path`; None if nobody does, or it cannot be read."""
    try:
        return read(path)
    except (OSError, SessionError):
        return None


def is_alive(holder: LeaseHolder) -> bool | None:
    """Whether a holder's process lives; None if it is on another machine, where only its silence can tell."""
    if holder.over:
        return False
    if holder.machine != locks.machine():
        return None
    return locks.started(holder.pid) == holder.started


def copy_journal(journal: Path) -> None:
    """Go on with a copy of a journal, so that what somebody still appends to the old one is never read."""
    if journal.exists():
        # `segments` knows a draft that a killed manager leaves by its ending.
        with draft_of(journal, draft=journal.with_name(f"{journal.name}.{secrets.token_hex(4)}.draft")) as draft:
            shutil.copyfile(journal, draft)
            draft.chmod(0o600)


def _wait_until_free(path: Path, before: LeaseHolder, *, patience_s: float) -> None:
    if before.over:
        raise SessionError(f"session folder {path.parent}: the session is over ({before.over}); start a new one")
    alive = is_alive(before)
    if alive:
        raise _taken(path, before)
    if alive is None:
        log.info("waiting %.0f s for a sign of the manager that was %s", patience_s, before)
        until = time.monotonic() + patience_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
            there = read(path)
            if there is None:
                return
            if there != before:
                raise _taken(path, there)


def _taken(path: Path, holder: LeaseHolder | None) -> TakenError:
    who = f" ({holder})" if holder else ""
    return TakenError(f"{path.parent} already has a manager{who}; one session has one manager")


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Starters on one machine follow each other. Where the file system has no locks the lease alone must do."""
    with open(path.with_suffix(".lock"), "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, holder: LeaseHolder) -> int:
    """Write a lease, whole or not at all; returns the file, open. Raises OSError."""
    file = -1
    try:
        with draft_of(path, draft=path.with_suffix(f".{holder.token}")) as draft:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            write_all(file, msgspec.json.encode(holder))
    except BaseException:
        if file >= 0:
            os.close(file)
        raise
    return file


def _myself() -> LeaseHolder:
    pid = os.getpid()
    return LeaseHolder(
        host=socket.gethostname(),
        machine=locks.machine(),
        pid=pid,
        started=locks.started(pid),
        token=secrets.token_hex(8),
    )
