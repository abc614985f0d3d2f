"""The files of a journal: segments of events, and the snapshot from which a manager comes back.

    journal                    the segment that is being written
    journal.000007             an earlier one
    journal.000008.snapshot    the core as it was before the first event of segment 8
    journal.next, *.draft      half made; removed at the next start
    journal.damaged-*, journal.aside-*    kept for people, the last three of each; never read

Compaction (`compaction`) begins a segment, writes the snapshot that belongs before it, and then removes what is older.
So the newest whole snapshot and the segments from its number on tell everything, whatever was killed meanwhile. Where
there is no snapshot, the segments from the first one on do.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.live.records import MAGIC, OLD_MAGIC, Damage, SegmentHead, scan
from stoker.protocol.wire import VERSION
from stoker.startup import RELEASE

NEXT = "next"
KEPT = 3
"""Damaged files, and journals put aside, that are kept for people."""
_STAMP = len("20261231-235959")
_NUMBERED = re.compile(r"journal\.(\d{6,})")
_SNAPSHOT = re.compile(r"journal\.(\d{6,})\.snapshot")

WRITER = f"{RELEASE} (protocol {VERSION})"
"""Who writes a segment: a manager of another version may decide otherwise about its events."""


class Segment(msgspec.Struct, frozen=True):
    """A file with events, and what its first record says of it."""

    path: Path
    head: SegmentHead


def new_head(number: int = 1, *, first: int = 0) -> SegmentHead:
    """The head of a segment that begins now."""
    return SegmentHead(number, first, secrets.token_hex(8), WRITER)


def kept_path(journal: Path, number: int) -> Path:
    """Where a segment lies that is not written any more."""
    return journal.with_name(f"{journal.name}.{number:06d}")


def snapshot_path(journal: Path, number: int) -> Path:
    """Where the snapshot lies that belongs before a segment."""
    return journal.with_name(f"{journal.name}.{number:06d}.snapshot")


def exists(journal: Path) -> bool:
    """Whether there is a journal: the segment that is written, or an earlier one (a manager was killed between
    them)."""
    return journal.exists() or any(_numbered(journal))


def segments(journal: Path) -> list[Segment]:
    """The segments there are, oldest first. Raises SessionError."""
    found: dict[int, Segment] = {}
    for path in (*(path for _, path in _numbered(journal)), journal):
        head = head_of(path) if path.exists() else None
        if head is not None:
            found[head.number] = Segment(path, head)
            if path == journal and head.mark:  # whatever has a later number does not belong to it
                found = {number: segment for number, segment in found.items() if number <= head.number}
    return [found[number] for number in sorted(found)]


def snapshots(journal: Path) -> list[tuple[int, Path]]:
    """The snapshots there are, newest first."""
    names = ((_SNAPSHOT.fullmatch(_plain(journal, path)), path) for path in _beside(journal))
    return sorted(((int(name[1]), path) for name, path in names if name), reverse=True)


def head_of(path: Path) -> SegmentHead | None:
    """What a segment's first record says; where that is damaged, its number alone. None if the file ends before it.
    Raises SessionError."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == OLD_MAGIC:
            return SegmentHead(1, 0, "", "")
    is_empty = True
    for _, _, record in scan(path):
        is_empty = False
        if isinstance(record, SegmentHead):
            return record
        if not isinstance(record, Damage) or record.at:  # behind a damaged first line the record may be whole
            break
    return None if is_empty else _guessed(path)


def _guessed(path: Path) -> SegmentHead:
    """The head of a segment whose first record is damaged: its name tells its number, if it has one."""
    name = _NUMBERED.fullmatch("journal" + path.suffix)
    if name is None:  # the one that is written
        after = max((number + 1 for number, _ in _numbered(path)), default=1)
        return SegmentHead(max([after, *(number for number, _ in snapshots(path))]), 0, "", "")
    return SegmentHead(int(name[1]), 0, "", "")


def leftovers(journal: Path) -> Iterator[Path]:
    """Files that somebody who was killed left half made."""
    for path in _beside(journal):
        if path.name.endswith(".draft") or path.name == f"{journal.name}.{NEXT}":
            yield path


def older(journal: Path, than: int) -> Iterator[Path]:
    """Segments and snapshots from before a number."""
    for number, path in (*_numbered(journal), *snapshots(journal)):
        if number < than:
            yield path


def everything(journal: Path) -> list[Path]:
    """All files that tell what happened."""
    return [
        path for path in (journal, *(path for _, path in (*_numbered(journal), *snapshots(journal)))) if path.exists()
    ]


def _numbered(journal: Path) -> Iterator[tuple[int, Path]]:
    for path in _beside(journal):
        if name := _NUMBERED.fullmatch(_plain(journal, path)):
            yield int(name[1]), path


def _beside(journal: Path) -> list[Path]:
    try:
        return sorted(journal.parent.glob(f"{journal.name}.*"))
    except OSError as error:
        raise SessionError(f"no journal at {journal}: {error.strerror}") from error


def _plain(journal: Path, path: Path) -> str:
    """A file's name as if the journal were called "journal"."""
    return "journal" + path.name.removeprefix(journal.name)


def remove_old_kept(journal: Path, *, needed: Collection[Path] = ()) -> None:
    """Of the files that are kept for people remove all but the last: damaged ones, and journals that were put aside.

    A file that is `needed` is a copy of a segment that is still read: without it the damage would be told again.
    """
    damaged = sorted(journal.parent.glob(f"{journal.name}.damaged-*"))
    for path in damaged[:-KEPT]:
        if path not in needed:
            path.unlink(missing_ok=True)
    aside: dict[str, list[Path]] = {}
    for path in journal.parent.glob(f"{journal.name}.aside-*"):
        aside.setdefault(path.name.partition(".aside-")[2][:_STAMP], []).append(path)
    for stamp in sorted(aside)[:-KEPT]:
        for path in aside[stamp]:
            path.unlink(missing_ok=True)
