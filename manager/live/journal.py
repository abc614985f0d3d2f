"""Every event of a session, in order, on disk before anything that follows from it is said to anybody.

Records of one turn of the loop are written with one `write(2)`: they survive a killed process. Surviving a host's crash
is the option `sync`: then a thread calls fdatasync, one call for all turns that ended while the one before was under
way (`syncing`). `safe` says how far the journal is safe; the loop says nothing that follows from later events.

A disk that is full or fails does not end the session: what was not written is kept, the file is cut to its last whole
record, and `flush` tries again (`trouble` says why). A record that was cut off by a crash is dropped when the journal
is opened again. What else may be wrong with a file is `replay`'s business.

Now and then a record says what the core decided about the events before it, a check each (`decisions`): so a replay
knows where it decides otherwise. What a manager decided last before it was killed may lack its check.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker import locks
from stoker.errors import SessionError
from stoker.manager.core.events import Event
from stoker.manager.live import segments
from stoker.manager.live.records import MAGIC, Damage, Decided, SegmentHead, as_bytes, encoded, scan
from stoker.manager.live.syncing import Syncing
from stoker.manager.live.taken import TakenError
from stoker.whole_files import append_whole, sync_folder, write_all

CHECKS = 64
"""Checks are written with the next turn once this many have gathered,"""
CHECKS_S = 0.2
"""or after this many seconds, whichever comes first."""
MOST_CHECKS = 10_000
"""A turn of the loop has fewer events than this."""
RETRY_S = 0.25
"""A journal that could not be written is tried again this often."""
SLOW = "its disk has not confirmed the last records"
"""Why a journal is not safe whose disk reports no error."""


class JournalEnd(msgspec.Struct, frozen=True):
    """Where writing goes on: the segment, how many events the journal has had, and the size of what is whole."""

    head: SegmentHead
    events: int
    size: int


class Journal:
    """The writing side. `write` collects, `flush` puts on disk. Raises SessionError where another manager has it.

    `end`: where the file is whole to (None: look). `position` counts bytes of this process, `safe` those of them that
    are as safe as they are to be, `written` those that a killed process leaves behind.
    """

    def __init__(self, path: Path, *, sync: bool = False, end: JournalEnd | None = None) -> None:
        self.path = path
        self.trouble = ""
        """Why it cannot be written just now; empty while it can."""
        self.errno = 0
        """The number of the last error."""
        self.position = self.written = self.safe = 0
        self._pending: list[bytes] = []
        self._checks, self._first = array("I"), 0
        self._checked_at = self._now = 0.0
        self._retry_at = 0.0
        found = end or find_end(path)
        self._fd = _locked(path)
        self.head = found.head if found is not None else segments.new_head()
        self.events = found.events if found is not None else 0
        """Written so far, those of managers before this one included."""
        self.size = found.size if found is not None else 0
        self._unsynced: list[bytes] = []
        """What was written since the last sync, a turn each: to be written again should the next one fail."""
        if self.size:
            os.ftruncate(self._fd, self.size)
        else:
            os.ftruncate(self._fd, 0)
            self._pending = [MAGIC, *encoded(0.0, self.head)]
        self._syncing = Syncing() if sync else None

    @property
    def is_synced(self) -> bool:
        """Whether it survives a host's crash."""
        return self._syncing is not None

    @property
    def wake_fd(self) -> int:
        """Readable when `safe` may have grown; -1: it grows in `flush` alone."""
        return self._syncing.wake_fd if self._syncing is not None else -1

    @property
    def pending_bytes(self) -> int:
        """What waits for room on the disk."""
        return sum(map(len, self._pending)) if self.trouble else 0

    @property
    def wait_s(self) -> float:
        """How long until `flush` should be called though nothing happened."""
        return max(0.0, self._retry_at - time.monotonic()) if self.trouble else float("inf")

    def write(self, now: float, event: Event) -> None:
        """Remember an event; `flush` makes it last."""
        self._now = now
        self.events += 1
        self._append(now, event)

    def take_back(self) -> None:
        """Forget the event that was written last and is not on disk: the core could not handle it."""
        self.position -= sum(map(len, self._pending[-2:]))
        del self._pending[-2:]
        self.events -= 1

    def decided(self, check: int) -> None:
        """Remember what was decided about the event that was written last."""
        if not self._checks:
            self._first = self.events - 1
        self._checks.append(check)

    def _append(self, now: float, record: Event | Decided) -> None:
        parts = encoded(now, record)
        self._pending += parts
        self.position += len(parts[0]) + len(parts[1])

    def _append_checks(self) -> None:
        checks = self._checks
        if not checks:
            return
        self._append(self._now, Decided(self._first, as_bytes(checks)))
        self._checks, self._checked_at = array("I"), self._now

    def flush(self) -> None:
        """Put what was written on disk. Where that fails `trouble` says so, and it is tried again when it is due."""
        if len(self._checks) >= CHECKS or self._now - self._checked_at >= CHECKS_S:
            self._append_checks()
        if self.trouble:
            if time.monotonic() < self._retry_at:
                return
        elif not self._pending:
            if self._syncing is not None:
                self._check_sync()
            return
        self._write_pending()

    def _write_pending(self) -> None:
        data = b"".join(self._pending)
        try:
            if self.trouble:
                os.ftruncate(self._fd, self.size)
            append_whole(self._fd, data, at=self.size)
        except OSError as error:
            self._pending = [data]
            self._failed(error, whole=self.size)
            return
        self._pending.clear()
        self.size += len(data)
        self.trouble = ""
        self.written = self.position
        if self._syncing is None:
            self.safe = self.position
            return
        self._unsynced.append(data)
        self._check_sync()

    def _failed(self, error: OSError, *, whole: int) -> None:
        """It cannot be written: cut the file to what is whole, and try again later."""
        self.trouble, self.errno = error.strerror or str(error), error.errno or 0
        self._retry_at = time.monotonic() + RETRY_S
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, whole)

    def _check_sync(self) -> None:
        """See what has been synced, and have the rest synced if there is any."""
        syncing = self._syncing
        assert syncing is not None
        done = syncing.done()
        if done is None:
            return
        if done.error is not None:  # the kernel may have dropped those pages: they are written once more
            self.size -= sum(map(len, self._unsynced))
            self.written = self.safe
            self._pending = self._unsynced + self._pending
            self._unsynced = []
            self._failed(done.error, whole=self.size)
            return
        del self._unsynced[: done.turns]
        self.safe = max(self.safe, done.position)
        if self._unsynced:
            syncing.begin(self._fd, position=self.position, turns=len(self._unsynced))

    def settle(self, *, within_s: float = 10.0) -> bool:
        """Wait until all that was written is safe; False if it is not by then."""
        until = time.monotonic() + within_s
        self.flush()
        while (self.trouble or self.safe < self.position) and time.monotonic() < until:
            if self._syncing is not None and not self.trouble:
                self._syncing.wait(until - time.monotonic())
            else:
                time.sleep(min(RETRY_S, 0.05))
            self.flush()
        return not self.trouble and self.safe >= self.position

    def begin_segment(self) -> SegmentHead:
        """Keep the file as an earlier segment, and go on in a new one. Everything must be safe. Raises OSError, and
        then goes on in the old one; SessionError where another manager has the journal by now."""
        self._append_checks()
        if not self.settle():
            raise OSError(f"the journal {self.path} cannot be written: {self.trouble}")
        if not os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
            raise SessionError(f"{self.path.parent} has another manager by now; one session has one manager")
        head = segments.new_head(self.head.number + 1, first=self.events)
        draft = self.path.with_name(f"{self.path.name}.{segments.NEXT}")
        start = b"".join([MAGIC, *encoded(self._now, head)])
        draft.unlink(missing_ok=True)
        fd = _locked(draft)
        try:
            write_all(fd, start)
            if self._syncing is not None:
                os.fdatasync(fd)
            kept = segments.kept_path(self.path, self.head.number)
            os.rename(self.path, kept)
            try:
                os.rename(draft, self.path)
            except OSError:
                os.rename(kept, self.path)
                raise
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self.head, self.size = fd, head, len(start)
        if self._syncing is not None:
            sync_folder(self.path.parent)
        return head

    def close(self) -> None:
        """Put what is left on disk and let go of the file. Raises SessionError where the disk does not take it."""
        self._append_checks()
        safe = self.settle(within_s=2.0)
        if self._syncing is not None:
            self._syncing.close()
        os.close(self._fd)
        if not safe:
            raise SessionError(f"the journal {self.path} cannot be written: {self.trouble or SLOW}; make room there")


def read(path: Path) -> Iterator[tuple[float, Event]]:
    """The events of one file of a journal, oldest first. Raises SessionError if it is none; see `scan` for damage."""
    for now, record in read_checked(path):
        if not isinstance(record, Decided):
            yield now, record


def read_checked(path: Path) -> Iterator[tuple[float, Event | Decided]]:
    """The same, and what was decided about them: some time after the events that it is about."""
    for _, now, record in scan(path):
        if not isinstance(record, Damage | SegmentHead):
            yield now, record


def find_end(path: Path) -> JournalEnd | None:
    """Where a file is whole to; None if it has no whole head. Raises SessionError if it is no journal."""
    head = segments.head_of(path) if path.exists() else None
    if head is None:
        return None
    end, events = len(MAGIC), head.first
    for at, _, record in scan(path):
        if isinstance(record, Damage):
            continue
        end = at
        events += not isinstance(record, Decided | SegmentHead)
    return JournalEnd(head, events, end)


def _locked(path: Path) -> int:
    """The file, opened to append to, with the lock that tells other managers to stay away. Raises SessionError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    if not locks.take(fd):
        os.close(fd)
        raise TakenError(f"{path.parent} already has a manager; one session has one manager")
    return fd
