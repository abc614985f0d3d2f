"""Restore a manager from its journal: load the newest snapshot and replay the later events, even if some are damaged.

- If whole records follow a damaged record, only its event is lost. The core continues with a gap (`RecordsLost`), and
  every peer reports its state again.
- If a replay is impossible, or another version of Stoker decided differently, the manager renames all files
  (`journal.aside-*`) and starts a new core with the call results that clients have not confirmed.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker.errors import SessionError
from stoker.manager.core.events import Command, Event, FromPilot, ManagerRestarted, RecordsLost
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live import records, snapshot
from stoker.manager.live.decisions import decision_checksum
from stoker.manager.live.journal import JournalEnd
from stoker.manager.live.records import DamagedPart, DecisionChecksums, Segment, SegmentHead, read_records
from stoker.manager.live.snapshot import UnreadableSnapshotError, list_policy_modules
from stoker.manager.policies import default_policies
from stoker.protocol.calls import CallEnd
from stoker.protocol.to_manager import CallsEnded
from stoker.units import show_bytes
from stoker.whole_files import draft_file, sync_folder

log = logging.getLogger("stoker.manager")

MOST_CHECKS = 10_000
"""Maximum number of decisions to compare at once. One iteration of the manager's loop makes fewer decisions."""
_NO_SNAPSHOT = "its snapshot is missing"


class ReplayedEvent(NamedTuple):
    """An event that a replay handled. `writer`: version of Stoker that wrote it (empty: unknown)."""

    number: int
    now: float
    event: Event
    commands: Sequence[Command]
    check: int
    writer: str


class EventFailedError(Exception):
    """The core or a policy raised an exception (the cause) when it handled an event."""

    def __init__(self, number: int, now: float) -> None:
        super().__init__(number, now)
        self.number, self.now = number, now


class JournalReplay:
    """Replays a journal from its newest readable snapshot, or from its first segment. `since`: time of the snapshot (0
    = none). `unreadable`: unreadable snapshots, with the reason. `lost`: damaged bytes so far. `is_comparable`: False
    after a damaged record, until the restart of a manager that had lost the same events. `checked`, `difference`:
    number of equal decisions, and the first different one.
    """

    def __init__(
        self, journal: Path, session: str = "", policies: Policies | None = None, *, watch: frozenset[int] = frozenset()
    ) -> None:
        self.journal = journal
        self.core: Core | None = None
        self._session, self._policies, self._watch = session, policies, watch
        self.since = 0.0
        self.unreadable: dict[Path, str] = {}
        self.unconfirmed: list[CallEnd] = []
        self.snapshot_bytes = 0
        self.damage: list[tuple[Segment, DamagedPart]] = []
        self.head: SegmentHead | None = None
        self.whole = 0
        self.bytes_read = 0
        self.lost = 0
        self.is_comparable = True
        self.checked = 0
        self.difference: ReplayedEvent | None = None
        if not records.journal_exists(journal):
            raise SessionError(f"no journal at {journal}: No such file or directory")
        self._segments = records.list_segments(journal)
        self._load_newest_snapshot(list_policy_modules(policies))
        self.next_event = self._segments[0].head.first if self._segments else 0

    @property
    def is_whole(self) -> bool:
        """True if the files contain all events from a snapshot, or from the beginning, to the last event."""
        return self.core is not None or not self._segments or self._segments[0].head.number == 1

    @property
    def first_segment_number(self) -> int:
        return self._segments[0].head.number if self._segments else 1

    def _load_newest_snapshot(self, modules: frozenset[str]) -> None:
        for number, path in records.list_snapshots(self.journal):
            following = [each for each in self._segments if each.head.number >= number]
            if not following or following[0].head.number != number:
                continue  # the manager was killed, or lost its lease, before it began this segment
            try:
                found = snapshot.read_snapshot(path)
                if not self.unreadable:
                    self.unconfirmed = found.ends
                if following[0].head.mark not in ("", found.segment.mark):
                    continue
                self.core = snapshot.load_core(found, modules=modules)
            except UnreadableSnapshotError as error:
                self.unreadable[path] = str(error)
                continue
            self.core.manager.watch = self._watch
            self.since, self.snapshot_bytes = self.core.state.now, path.stat().st_size
            self._segments = following
            return

    def get_or_create_core(self, now: float) -> Core:
        if self.core is None:
            self.core = Core(self._session, self._policies or default_policies(), now=now, watch=self._watch)
            self.core.start()
        return self.core

    def read_events(self) -> Iterator[tuple[float, Event]]:
        for now, record in self.read_journal():
            if not isinstance(record, DecisionChecksums):
                yield now, record

    def handle(self, event: Event, now: float) -> list[Command]:
        return self.get_or_create_core(now).handle(event, now)

    def replay_and_compare(self) -> Iterator[ReplayedEvent]:
        """Handle and yield each event, and compare the decisions. Raises EventFailedError."""
        replayed: dict[int, ReplayedEvent] = {}
        for now, record in self.read_journal():
            if isinstance(record, DecisionChecksums):
                if self.is_comparable and self.difference is None:
                    self._compare_checksums(record, replayed)
                replayed.clear()
                continue
            number, core = self.next_event - 1, self.get_or_create_core(now)
            try:
                commands = core.handle(record, now)
                check = decision_checksum(commands)
            except Exception as error:
                raise EventFailedError(number, now) from error
            if isinstance(record, ManagerRestarted):
                replayed.clear()
            event = ReplayedEvent(number, now, record, commands, check, self.head.stoker if self.head else "")
            if len(replayed) < MOST_CHECKS:
                replayed[number] = event
            yield event

    def _compare_checksums(self, record: DecisionChecksums, replayed: dict[int, ReplayedEvent]) -> None:
        for number, check in record.numbered_checks():
            mine = replayed.get(number)
            if mine is not None and mine.check != check:
                self.difference = mine
                return
            self.checked += mine is not None

    def read_journal(self) -> Iterator[tuple[float, Event | DecisionChecksums]]:
        """Yield the events since the snapshot, with `RecordsLost` for damaged records, and the checksums."""
        if not self.is_whole:
            why = "; ".join(self.unreadable.values()) or _NO_SNAPSHOT
            raise SessionError(f"{self.journal} lacks the beginning of the session: {why}")
        now = self.since or self._first_event_at()
        number = self.first_segment_number
        for segment in self._segments:
            if segment.head.number != number:
                yield (
                    now,
                    self._count_event(RecordsLost(0, f"segments {number} to {segment.head.number - 1} are missing")),
                )
            number = segment.head.number + 1
            yield from self._read_segment(segment, now)

    def _first_event_at(self) -> float:
        for segment in self._segments:
            times = (at for _, at, record in read_records(segment.path) if not isinstance(record, DamagedPart))
            if at := next(filter(None, times), 0.0):
                return at
        return self._segments[-1].path.stat().st_mtime if self._segments else 0.0

    def _read_segment(self, segment: Segment, now: float) -> Iterator[tuple[float, Event | DecisionChecksums]]:
        last = segment is self._segments[-1]
        self.head, self.whole = segment.head, 0
        if segment.head.mark:  # a damaged head has no event number
            self.next_event = segment.head.first
        for end, at, record in read_records(segment.path):
            if isinstance(record, DamagedPart):
                self.damage.append((segment, record))
                if record.cut and last:
                    return
                yield now, self._count_event(RecordsLost(record.length, record.why))
            elif isinstance(record, SegmentHead):
                now = max(now, at)
            elif isinstance(record, DecisionChecksums):
                yield at, record
            else:
                now = at
                yield at, self._count_event(record)
            self.bytes_read += end - self.whole
            self.whole = end

    def _count_event(self, event: Event) -> Event:
        self.next_event += 1
        if isinstance(event, RecordsLost):
            self.lost += max(1, event.bytes)
            self.is_comparable = False
        elif isinstance(event, ManagerRestarted):  # a manager that had lost fewer events may decide differently
            self.is_comparable = event.lost >= self.lost
        return event


class RestoredManager(msgspec.Struct):
    """`core`: None without a journal, or if the journal was renamed. `end`: where the journal continues. `ends`:
    unconfirmed call results for a new core. `compact`: a snapshot should be written soon.
    """

    core: Core | None = None
    end: JournalEnd | None = None
    ends: list[CallEnd] = []
    notices: list[str] = []
    snapshot_bytes: int = 0
    tail_bytes: int = 0
    compact: bool = False
    lost: int = 0


def restore_manager(journal: Path, session: str, policies: Policies) -> RestoredManager:
    """Restore a manager from its journal. Raises SessionError if the file is not a journal."""
    for path in records.incomplete_files(journal):
        path.unlink(missing_ok=True)
    if not records.journal_exists(journal):
        return RestoredManager()
    past = JournalReplay(journal, session, policies)
    is_from_snapshot = past.core is not None
    if not past.is_whole:
        why = next(iter(past.unreadable.values()), _NO_SNAPSHOT)
        return _put_journal_aside(past, f"the journal lacks the beginning of the session ({why})")
    try:
        for _ in past.replay_and_compare():
            pass
    except EventFailedError as error:
        log.exception("event %d of the journal cannot be replayed", error.number)
        why = f"{type(error.__cause__).__name__}: {error.__cause__}"
        return _put_journal_aside(past, f"event {error.number:,} of the journal cannot be replayed ({why})")
    notices = []
    if different := past.difference:
        where = f"event {different.number:,} of the journal"
        if different.writer != records.WRITER:
            theirs = f"Stoker {different.writer or 'of an unknown version'}, which wrote it"
            return _put_journal_aside(past, f"Stoker {records.WRITER} decides differently about {where} than {theirs}")
        text = f"a replay decides differently about {where} than the manager did; report this, with the journal"
        log.error("%s", text)
        notices.append(text)
    head = past.head or records.create_segment_head()
    notices += _keep_damaged_files(past)
    if journal.exists():
        end = JournalEnd(head, past.next_event, past.whole)
    else:  # a manager was killed between the end of a segment and the start of the next
        end = JournalEnd(records.create_segment_head(head.number + 1, first=past.next_event), past.next_event, 0)
    if is_from_snapshot:
        for path in records.older_files(journal, past.first_segment_number):
            path.unlink(missing_ok=True)
    notices += [f"{path.name}: this snapshot cannot be read ({why})" for path, why in past.unreadable.items()]
    return RestoredManager(
        past.core,
        end,
        notices=notices,
        snapshot_bytes=past.snapshot_bytes,
        tail_bytes=past.bytes_read,
        compact=bool(past.damage) or head.stoker != records.WRITER,
        lost=past.lost,
    )


def _keep_damaged_files(past: JournalReplay) -> list[str]:
    """Keep copies of damaged files, and continue in a new segment. Return notices for users."""
    notices = []
    for segment, damage in past.damage:
        path = segment.path
        if damage.cut:
            log.info("%s: the last %d bytes are an incomplete record", path, damage.length)
            continue
        kept = past.journal.with_name(f"{past.journal.name}.damaged-{segment.head.number:06d}-{damage.at}")
        text = f"{show_bytes(damage.length)} of the journal were damaged and are lost ({damage.why})"
        if not kept.exists():
            why = _keep_file(path, kept)
            ending = f"could not be kept: {why}" if why else f"is kept as {kept.name}"
            notices.append(f"{text}; the damaged file {ending}")
        log.error("%s, at byte %d: %s", path, damage.at, notices[-1] if notices else text)
    if past.head is not None and any(each.path == past.journal and not damage.cut for each, damage in past.damage):
        os.truncate(past.journal, past.whole)
        past.journal.rename(records.numbered_segment_path(past.journal, past.head.number))
        sync_folder(past.journal.parent)
    return notices


def _keep_file(path: Path, name: Path) -> str:
    """Keep a file by a hard link or a copy. Return why this failed; empty on success."""
    try:
        name.hardlink_to(path)
        return ""
    except OSError as error:
        log.info("%s cannot be linked (%s): it is copied", path, error.strerror)
    try:
        with draft_file(name, draft=name.with_name(f"{name.name}.draft")) as draft:
            shutil.copyfile(path, draft)
            draft.chmod(0o600)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _put_journal_aside(past: JournalReplay, why: str) -> RestoredManager:
    """Rename all journal files. Return a manager with only the unconfirmed call results."""
    ends = {end.call: end for end in past.unconfirmed}
    files = records.journal_files(past.journal)
    for path in files:
        if path.suffix != ".snapshot":
            ends.update({end.call: end for end in _read_successful_ends(path)})
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for path in files:
        name = path.name.removeprefix(past.journal.name)
        path.rename(path.with_name(f"{past.journal.name}.aside-{stamp}{name.replace('.', '-')}"))
    records.remove_old_journals(past.journal)
    kept = f"its files are kept as {past.journal.name}.aside-{stamp}*"
    notice = f"{why}: {kept}, and clients and pilots report their state again"
    log.error("%s", notice)
    return RestoredManager(ends=list(ends.values()), notices=[notice])


def _read_successful_ends(path: Path) -> Iterator[CallEnd]:
    messages = (
        each for _, _, record in read_records(path) if isinstance(record, FromPilot) for each in record.messages
    )
    return (end for message in messages if isinstance(message, CallsEnded) for end in message.ends if end.ok)
