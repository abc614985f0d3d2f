"""Write every event of a session to the journal on disk before any message that results from the event is sent.

One `write(2)` writes the records of one turn of the manager's loop, so the records survive if the process is killed.
With `sync`, a thread also calls fdatasync, so the records survive a crash of the host. On a full or failing disk, the
file is truncated to its last whole record, later records stay in memory, and `flush` tries again. Checksums of the
core's decisions (`decisions`) let a replay detect differences.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import time
from array import array
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeGuard

import msgspec

from stoker import locks
from stoker.errors import SessionError
from stoker.manager.core.events import Command, Event, ToPilot
from stoker.manager.live import records
from stoker.manager.live.lease import LeaseTakenError
from stoker.manager.live.records import (
    MAGIC,
    DamagedPart,
    DecisionChecksums,
    SegmentHead,
    create_segment_head,
    encode_record,
    read_records,
    read_segment_head,
)
from stoker.protocol import to_pilot
from stoker.protocol.ids import PilotId
from stoker.protocol.status import JOURNAL
from stoker.protocol.to_client import Status
from stoker.units import show_seconds
from stoker.whole_files import append_or_truncate, sync_folder, write_all

log = logging.getLogger("stoker.manager")

CHECKSUMS_PER_RECORD = 64
MAX_CHECKSUM_DELAY_S = 0.2
"""Maximum seconds before collected checksums are written to the journal."""
RETRY_S = 0.25
UNCONFIRMED = "its disk has not confirmed the last records"
"""Message if the disk reports no error but a sync takes too long."""
REPORT_AFTER_S = 3.0
MAX_END_DELAY_S = 2.0
"""Maximum seconds that an ending session waits for the disk to confirm its journal."""
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class SyncResult(NamedTuple):
    """Result of a sync: the journal position up to which data is safe, the number of synced writes, and the error."""

    position: int
    turns: int
    error: OSError | None = None


class SyncThread:
    """Calls fdatasync in a thread, for the manager's loop. `wake_fd` becomes readable after each fdatasync."""

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stoker-sync")
        self._sync: Future[SyncResult] | None = None
        """The running sync, or a finished sync whose result `take_result` has not returned."""

    def start_sync(self, fd: int, *, position: int, turns: int) -> None:
        self._sync = self._thread.submit(_sync, fd, position=position, turns=turns)
        self._sync.add_done_callback(lambda _: os.eventfd_write(self.wake_fd, 1))

    def take_result(self) -> SyncResult | None:
        """Return None while a sync runs, the result of an ended sync once, and otherwise an empty result."""
        if self._sync is None:
            return SyncResult(0, 0)
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return None
        result, self._sync = self._sync.result(), None
        return result

    def wait_for_sync(self, timeout_s: float) -> None:
        if self._sync is not None:
            select.select([self.wake_fd], [], [], max(0.0, timeout_s))

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self.wake_fd)


def _sync(fd: int, *, position: int, turns: int) -> SyncResult:
    try:
        os.fdatasync(fd)
    except OSError as error:
        return SyncResult(0, turns, error)
    return SyncResult(position, turns)


class JournalEnd(NamedTuple):
    """Where a journal continues: its last segment, the number of earlier events, and the segment's undamaged bytes."""

    head: SegmentHead
    events: int
    size: int


class Journal:
    """The journal of a session. Raises SessionError if another manager uses the journal. `position`: bytes that this
    process has added. `written`: bytes that survive if the process dies. `safe`: bytes synced to disk (without `sync`,
    written bytes).
    """

    def __init__(self, path: Path, *, sync: bool = False, end: JournalEnd | None = None) -> None:
        self.path = path
        self.trouble = ""
        """Reason why the journal cannot be written now; empty if it can be written."""
        self.errno = 0
        self.position = self.written = self.safe = 0
        self._checks, self._first_checked_event = array("I"), 0
        self._checked_at = self._now = self._retry_at = 0.0
        self.head, self.events, self.size = end or find_journal_end(path) or JournalEnd(create_segment_head(), 0, 0)
        self._fd = _open_and_lock(path)
        self._unsynced: list[bytes] = []
        """Data of each write since the last sync. If a sync fails, the data is written again."""
        os.ftruncate(self._fd, self.size)
        self._pending: list[bytes] = [] if self.size else [MAGIC, *encode_record(0.0, self.head)]
        self._sync_thread = SyncThread() if sync else None

    @property
    def wake_fd(self) -> int:
        """File descriptor that becomes readable when `safe` may have grown; -1 without `sync`."""
        return self._sync_thread.wake_fd if self._sync_thread is not None else -1

    @property
    def pending_bytes(self) -> int:
        return sum(map(len, self._pending)) if self.trouble else 0

    @property
    def wait_s(self) -> float:
        return max(0.0, self._retry_at - time.monotonic()) if self.trouble else math.inf

    def add_event(self, now: float, event: Event) -> None:
        self._now = now
        self.events += 1
        self._append_record(now, event)

    def remove_last_event(self) -> None:
        self.position -= sum(map(len, self._pending[-2:]))
        del self._pending[-2:]
        self.events -= 1

    def add_decision_checksum(self, check: int) -> None:
        if not self._checks:
            self._first_checked_event = self.events - 1
        self._checks.append(check)

    def _append_record(self, now: float, record: Event | DecisionChecksums) -> None:
        parts = encode_record(now, record)
        self._pending += parts
        self.position += len(parts[0]) + len(parts[1])

    def _append_checks(self) -> None:
        if self._checks:
            self._append_record(self._now, DecisionChecksums(self._first_checked_event, self._checks.tobytes()))
            self._checks, self._checked_at = array("I"), self._now

    def flush(self) -> None:
        """Write the collected events. On failure set `trouble`; the next call tries again."""
        if len(self._checks) >= CHECKSUMS_PER_RECORD or self._now - self._checked_at >= MAX_CHECKSUM_DELAY_S:
            self._append_checks()
        if self.trouble:
            if time.monotonic() < self._retry_at:
                return
        elif not self._pending:
            if self._sync_thread is not None:
                self._handle_finished_sync(self._sync_thread)
            return
        data = b"".join(self._pending)
        try:
            if self.trouble:
                os.ftruncate(self._fd, self.size)
            append_or_truncate(self._fd, data, at=self.size)
        except OSError as error:
            self._pending = [data]
            self._handle_write_error(error)
            return
        self._pending.clear()
        self.size += len(data)
        self.trouble = ""
        self.written = self.position
        if self._sync_thread is None:
            self.safe = self.position
            return
        self._unsynced.append(data)
        self._handle_finished_sync(self._sync_thread)

    def _handle_write_error(self, error: OSError) -> None:
        self.trouble, self.errno = error.strerror or str(error), error.errno or 0
        self._retry_at = time.monotonic() + RETRY_S
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self.size)

    def _handle_finished_sync(self, sync_thread: SyncThread) -> None:
        done = sync_thread.take_result()
        if done is None:
            return
        if done.error is not None:  # the kernel may have dropped the unsynced pages, so write the data again
            self.size -= sum(map(len, self._unsynced))
            self.written = self.safe
            self._pending = self._unsynced + self._pending
            self._unsynced = []
            self._handle_write_error(done.error)
            return
        del self._unsynced[: done.turns]
        self.safe = max(self.safe, done.position)
        if self._unsynced:
            sync_thread.start_sync(self._fd, position=self.position, turns=len(self._unsynced))

    def flush_until_safe(self, *, within_s: float = 10.0) -> bool:
        until = time.monotonic() + within_s
        self.flush()
        while (self.trouble or self.safe < self.position) and time.monotonic() < until:
            if self._sync_thread is not None and not self.trouble:
                self._sync_thread.wait_for_sync(until - time.monotonic())
            else:
                time.sleep(min(RETRY_S, 0.05))
            self.flush()
        return not self.trouble and self.safe >= self.position

    def begin_segment(self) -> SegmentHead:
        """Begin a new segment. After OSError, the old segment continues. Raises SessionError if another manager uses
        the journal.
        """
        self._append_checks()
        if not self.flush_until_safe():
            raise OSError(f"the journal {self.path} cannot be written: {self.trouble}")
        if not os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
            raise SessionError(f"{self.path.parent} now has another manager; a session can have only one manager")
        head = create_segment_head(self.head.number + 1, first=self.events)
        draft = self.path.with_name(f"{self.path.name}.{records.NEXT}")
        start = b"".join([MAGIC, *encode_record(self._now, head)])
        draft.unlink(missing_ok=True)
        fd = _open_and_lock(draft)
        try:
            write_all(fd, start)
            if self._sync_thread is not None:
                os.fdatasync(fd)
            kept = records.numbered_segment_path(self.path, self.head.number)
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
        if self._sync_thread is not None:
            sync_folder(self.path.parent)
        return head

    def close(self) -> None:
        """Close the journal. Raises SessionError if the last records cannot be written."""
        self._append_checks()
        safe = self.flush_until_safe(within_s=2.0)
        if self._sync_thread is not None:
            self._sync_thread.close()
        os.close(self._fd)
        if not safe:
            raise SessionError(
                f"the journal {self.path} cannot be written: {self.trouble or UNCONFIRMED}; make room there"
            )


def find_journal_end(path: Path) -> JournalEnd | None:
    head = read_segment_head(path) if path.exists() else None
    if head is None:
        return None
    end, events = len(MAGIC), head.first
    for at, _, record in read_records(path):
        if not isinstance(record, DamagedPart):
            end = at
            events += not isinstance(record, DecisionChecksums | SegmentHead)
    return JournalEnd(head, events, end)


def _open_and_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    if not locks.try_lock(fd):
        os.close(fd)
        raise LeaseTakenError(f"{path.parent} already has a manager; a session can have only one manager")
    return fd


class JournalTroubleReporter:
    """Reports an unwritable journal in `status`, in the log, and to connected programs."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self.text = ""
        """Reason why the journal cannot be written, with a remedy; empty if it can."""
        self._journal = journal
        self._folder = folder
        self._since = 0.0
        self._told = ""

    def take_notice(self, now: float) -> tuple[str, bool]:
        """Return a notice about a change (empty if none), and True if connected programs must be informed now."""
        notice = ""
        if self._journal.trouble and not self.text:
            self._since, self.text = now, explain_journal_trouble(self._journal, self._folder)
            log.warning("%s", self.text)
            notice = f"the journal cannot be written ({self._journal.trouble}): calls and results wait"
        elif self.text and not self._journal.trouble:
            self.text = ""
            notice = f"the journal can be written again, after {show_seconds(now - self._since)}"
        tell = self.text != self._told and (not self.text or now - self._since >= REPORT_AFTER_S)
        if tell:
            self._told = self.text
        return notice, tell

    def repeat_for_new_program(self) -> None:
        if self.text:
            self._told = ""

    def add_trouble_to_status(self, status: Status) -> Status:
        if not self.text:
            return status
        return msgspec.structs.replace(status, trouble={**status.trouble, JOURNAL: self.text})


def explain_journal_trouble(journal: Journal, folder: Path) -> str:
    why = f"calls and results wait until {journal.path} can be written"
    if journal.errno in _DISK_FULL_ERRORS:
        why = f"the disk of {folder} is full; calls and results wait until it has room: make room there"
    elif journal.errno == errno.EFBIG:
        why = (
            f"{journal.path} has reached this user's limit of file sizes (ulimit -f); calls and results wait until the"
            f" limit is raised (an admin may have to): prlimit --pid {os.getpid()} --fsize=unlimited"
        )
    return f"the journal cannot be written ({journal.trouble}): {why}"


class HeldCommands:
    """Batches of commands that wait until their journal positions are safe. Calls for pilots need no sync, because
    pilots report their calls after a crash of this host. All messages to a pilot keep their order, except
    acknowledgements."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._batches: deque[tuple[int, list[Command]]] = deque()
        self._ordered: Counter[PilotId] = Counter()
        self.ends_by = math.inf
        """Time at which an ending session exits even if its journal is unwritten."""

    def hold(self, commands: list[Command]) -> None:
        if commands:
            self._batches.append((self._journal.position, commands))

    def split_by_sync_need(self, commands: list[Command]) -> tuple[list[Command], list[Command]]:
        """Return the commands to send before the journal is synced, and the other commands."""
        is_written = self._journal.position <= self._journal.written
        now: list[Command] = []
        later: list[Command] = []
        for command in commands:
            if _is_ordered_pilot_command(command):
                if is_written and type(command.message) is to_pilot.RunCalls and not self._ordered[command.pilot]:
                    now.append(command)
                    continue
                self._ordered[command.pilot] += 1
            later.append(command)
        return now, later

    def may_release_oldest(self, now: float, *, ending: bool) -> bool:
        """True if the oldest batch may be sent: it is safe, or an `ending` session has waited `MAX_END_DELAY_S`."""
        if not self._batches:
            return False
        if ending:
            self.ends_by = min(self.ends_by, now + MAX_END_DELAY_S)
        return now >= self.ends_by or self._batches[0][0] <= self._journal.safe

    def release_oldest(self) -> list[Command]:
        commands = self._batches.popleft()[1]
        if self._ordered:
            for command in commands:
                if _is_ordered_pilot_command(command):
                    self._ordered[command.pilot] -= 1
            if not self._batches:
                self._ordered.clear()
        return commands


def _is_ordered_pilot_command(command: Command) -> TypeGuard[ToPilot]:
    return type(command) is ToPilot and type(command.message) is not to_pilot.Ack
