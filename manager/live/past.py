"""What a journal tells of a session's past: the core as a snapshot has it, and the events since then.

Every reader of a journal begins here: the manager that comes back (`comeback`), and the commands that replay a session.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.core.events import Event, ManagerRestarted, RecordsLost
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live import segments, snapshot
from stoker.manager.live.pickled import Unreadable
from stoker.manager.live.records import Damage, Decided, SegmentHead, scan
from stoker.manager.live.segments import Segment


class DamagedPlace(msgspec.Struct, frozen=True):
    """Damage in a file."""

    path: Path
    damage: Damage


class JournalPast:
    """A journal's newest readable beginning, and what follows.

    `core`: as the snapshot has it, None where the journal begins with the session. `since`: when the snapshot was made
    (0: nothing is missing). `events`: the number of the next event. `unreadable`: snapshots that could not be read, and
    why. `certain`: what the newest of them says for certain all the same. `lost`: bytes that were damaged so far; a
    part that is missing counts as one at least. `is_comparable`: False between damage and the first manager that came
    back without what it cost: what was decided there rested on what is lost, so a replay may decide otherwise.
    """

    def __init__(self, journal: Path, *, watch: frozenset[int] = frozenset(), policies: Policies | None = None) -> None:
        self.journal = journal
        self.core: Core | None = None
        self.since = 0.0
        self.unreadable: dict[Path, str] = {}
        self.certain = snapshot.CertainFacts()
        self.snapshot_bytes = 0
        self.damage: list[DamagedPlace] = []
        """What the records that were read so far had of it."""
        self.head: SegmentHead | None = None
        """Of the segment that was read last, and how far it is whole."""
        self.whole = 0
        self.bytes_read = 0
        """Of all segments that were read."""
        self.lost = 0
        self.is_comparable = True
        if not segments.exists(journal):
            raise SessionError(f"no journal at {journal}: No such file or directory")
        self._segments = segments.segments(journal)
        self._begin(watch, policies_modules(policies))
        self.events = self._segments[0].head.first if self._segments else 0

    @property
    def is_whole(self) -> bool:
        """Whether what is there leads from a snapshot, or from the session's beginning, to its end."""
        return self.core is not None or not self._segments or self._segments[0].head.number == 1

    @property
    def first_segment(self) -> int:
        """The number of the first segment that is read."""
        return self._segments[0].head.number if self._segments else 1

    def head_number(self, path: Path) -> int:
        """The number of the segment in a file."""
        return next((each.head.number for each in self._segments if each.path == path), 0)

    def _begin(self, watch: frozenset[int], modules: frozenset[str]) -> None:
        for number, path in segments.snapshots(self.journal):
            following = [each for each in self._segments if each.head.number >= number]
            if not following or following[0].head.number != number:
                continue  # a manager that was killed, or has lost the session, had not begun its segment
            try:
                found = snapshot.read(path)
                if not self.unreadable:
                    self.certain = found.certain
                if following[0].head.mark not in ("", found.head.segment.mark):
                    continue
                self.core = snapshot.restored(found, modules=modules)
            except Unreadable as error:
                self.unreadable[path] = str(error)
                continue
            self.core.manager.watch = watch
            self.since, self.snapshot_bytes = found.head.at, path.stat().st_size
            self._segments = following
            return

    def records(self) -> Iterator[tuple[float, Event | Decided]]:
        """The events since then, and what was decided about them. Damage is an event: `RecordsLost`; a last record that
        was not written to its end is none. Raises SessionError where the journal's beginning is missing."""
        if not self.is_whole:
            why = "; ".join(self.unreadable.values()) or "the snapshot that belongs before it is not there"
            raise SessionError(f"{self.journal} does not tell how the session began: {why}")
        now = self.since or self._began_at()
        number = self._segments[0].head.number if self._segments else 0
        for segment in self._segments:
            if segment.head.number != number:
                yield now, self._event(RecordsLost(0, f"segments {number} to {segment.head.number - 1} are missing"))
            number = segment.head.number + 1
            yield from self._of(segment, now)

    def _began_at(self) -> float:
        """When the first record was written that can be read; where none can, when the file was."""
        for segment in self._segments:
            times = (at for _, at, record in scan(segment.path) if not isinstance(record, Damage))
            if at := next(filter(None, times), 0.0):
                return at
        return self._segments[-1].path.stat().st_mtime if self._segments else 0.0

    def _of(self, segment: Segment, now: float) -> Iterator[tuple[float, Event | Decided]]:
        last = segment is self._segments[-1]
        self.head, self.whole = segment.head, 0
        if segment.head.mark:  # one of before there were segments, or with a damaged head, does not know
            self.events = segment.head.first
        for end, at, record in scan(segment.path):
            if isinstance(record, Damage):
                self.damage.append(DamagedPlace(segment.path, record))
                if record.cut and last:
                    return
                yield now, self._event(RecordsLost(record.length, record.why))
            elif isinstance(record, SegmentHead):
                now = max(now, at)
            elif isinstance(record, Decided):
                yield at, record
            else:
                now = at
                yield at, self._event(record)
            self.bytes_read += end - self.whole
            self.whole = end

    def _event(self, event: Event) -> Event:
        self.events += 1
        if isinstance(event, RecordsLost):
            self.lost += max(1, event.bytes)
            self.is_comparable = False
        elif isinstance(event, ManagerRestarted):  # a later damage may have hit what this manager still had
            self.is_comparable = event.lost >= self.lost
        return event


def policies_modules(policies: Policies | None) -> frozenset[str]:
    """The modules of policies, which may be a user's own, and what is imported of the packages that they are in."""
    if policies is None:
        return frozenset()
    seams = (policies.dispatch, policies.residency, policies.provisioning)
    packages = {type(seam).__module__.partition(".")[0] for seam in seams} - {"stoker"}
    of_packages = (name for name in list(sys.modules) if name.partition(".")[0] in packages)
    return frozenset((*of_packages, *(type(seam).__module__ for seam in seams)))
