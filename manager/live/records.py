"""The files of a journal, and the records in them.

    journal                    the segment that is being written
    journal.000007             an earlier segment
    journal.000008.snapshot    the core before the first event of segment 8
    journal.next, *.draft      incomplete files; removed at the next start
    journal.damaged-*          damaged files, kept for people
    journal.aside-*            journals that could not be replayed; the last three are kept for people

The newest whole snapshot and the segments from the same number on are always complete. Without a snapshot, all segments
are complete.

A record is `length (4 bytes) | crc32 (4 bytes) | MessagePack [now, event]`, little endian. A file begins with a line
that names the format, and a `SegmentHead` record. After a damaged record, the reader searches for the next intact
record: MessagePack's two bytes for a pair that begins with a time, and a correct checksum. If no intact record follows
an incomplete record, the file was cut off.
"""

from __future__ import annotations

import mmap
import operator
import re
import secrets
import struct
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.core.events import Event
from stoker.protocol.wire import VERSION
from stoker.startup import RELEASE

HEAD = struct.Struct("<II")
MAGIC = b"stoker journal 2\n"
_OTHER_MAGIC = re.compile(rb"stoker journal [0-9]+(\n|\Z)")
_PAIR_WITH_TIME = b"\x92\xcb"

NEXT = "next"
KEPT_OLD_JOURNALS = 3
_STAMP = len("20261231-235959")
_NUMBERED = re.compile(r"journal\.(\d{6,})")
_SNAPSHOT = re.compile(r"journal\.(\d{6,})\.snapshot")

WRITER = f"{RELEASE} (protocol {VERSION})"
"""Version of Stoker that writes a segment. Another version may decide differently."""

# ---- records


class DecisionChecksums(msgspec.Struct, frozen=True, tag="decided", array_like=True):
    """Checksums (4 bytes each) of the decisions about events. `first`: number of the first event, from 0."""

    first: int
    checks: bytes

    def numbered_checks(self) -> Iterator[tuple[int, int]]:
        return enumerate(array("I", self.checks), self.first)


class SegmentHead(msgspec.Struct, frozen=True, tag="segment", array_like=True):
    """First record of a segment. `number`: from 1. `first`: number of its first event. `mark`: random text, which its
    snapshot also contains. `stoker`: version that began the segment."""

    number: int
    first: int
    mark: str
    stoker: str


class DamagedPart(msgspec.Struct, frozen=True):
    """A damaged part of a journal file. `cut`: True if a process died while it wrote the last record."""

    at: int
    length: int
    cut: bool
    why: str


Record = Event | DecisionChecksums | SegmentHead

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[float, Record]).decode


def encode_record(now: float, record: Record) -> tuple[bytes, bytes]:
    body = _encode((now, record))
    return HEAD.pack(len(body), zlib.crc32(body)), body


def read_records(path: Path) -> Iterator[tuple[int, float, Record | DamagedPart]]:
    """Yield the end offset, time and content of each record and damaged part. Raises SessionError."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise SessionError(f"no journal at {path}: {error.strerror}") from error
    with file:
        size = path.stat().st_size
        magic = file.read(len(MAGIC))
        at = len(MAGIC)
        if magic != MAGIC:
            if size <= len(MAGIC) and MAGIC.startswith(magic):
                return
            if _OTHER_MAGIC.match(magic):
                raise SessionError(f"{path} is not a journal of this version")
            whole = _next_intact_record_offset(path, 0)
            # A damaged first line resembles MAGIC, or contains only zeros (its page was never written).
            is_first_line = not any(magic) or sum(map(operator.eq, magic, MAGIC)) > len(MAGIC) // 2
            if whole is None and not is_first_line:
                raise SessionError(f"{path} is not a journal")
            at = size if whole is None else whole
            file.seek(at)
            yield at, 0.0, DamagedPart(0, at, cut=False, why="its first line is damaged")
        now = 0.0
        while at < size:
            head = file.read(HEAD.size)
            length, crc = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
            end = at + HEAD.size + length
            body = file.read(length) if length and end <= size else b""
            if body and zlib.crc32(body) == crc:
                try:
                    now, record = _decode(body)
                    found: Record | DamagedPart = record
                except (ValueError, RecursionError) as error:  # msgspec's DecodeError is a ValueError
                    found = DamagedPart(at, end - at, cut=False, why=f"it cannot be decoded: {error}")
            else:
                whole = _next_intact_record_offset(path, at + 1)
                cut = whole is None and (len(head) < HEAD.size or (length > 0 and end > size))
                end = size if whole is None else whole
                file.seek(end)
                found = DamagedPart(at, end - at, cut=cut, why="its checksum is wrong")
            yield end, now, found
            at = end


def _next_intact_record_offset(path: Path, start: int) -> int | None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size, at = len(data), start + HEAD.size
        while (at := data.find(_PAIR_WITH_TIME, at)) >= 0:
            length, crc = HEAD.unpack(data[at - HEAD.size : at])
            if len(_PAIR_WITH_TIME) < length <= size - at and zlib.crc32(data[at : at + length]) == crc:
                return at - HEAD.size
            at += 1
    return None


# ---- files


class Segment(msgspec.Struct, frozen=True):
    path: Path
    head: SegmentHead


def create_segment_head(number: int = 1, *, first: int = 0) -> SegmentHead:
    return SegmentHead(number, first, secrets.token_hex(8), WRITER)


def numbered_segment_path(journal: Path, number: int) -> Path:
    return journal.with_name(f"{journal.name}.{number:06d}")


def snapshot_path(journal: Path, number: int) -> Path:
    return journal.with_name(f"{journal.name}.{number:06d}.snapshot")


def journal_exists(journal: Path) -> bool:
    """True also if a killed manager left only earlier segments."""
    return journal.exists() or any(_numbered_files(journal, _NUMBERED))


def list_segments(journal: Path) -> list[Segment]:
    found: dict[int, Segment] = {}
    for path in (*(path for _, path in _numbered_files(journal, _NUMBERED)), journal):
        head = read_segment_head(path) if path.exists() else None
        if head is not None:
            found[head.number] = Segment(path, head)
            if path == journal and head.mark:  # files with larger numbers do not belong to this journal
                found = {number: segment for number, segment in found.items() if number <= head.number}
    return [found[number] for number in sorted(found)]


def list_snapshots(journal: Path) -> list[tuple[int, Path]]:
    return sorted(_numbered_files(journal, _SNAPSHOT), reverse=True)


def read_segment_head(path: Path) -> SegmentHead | None:
    """Return the head of a segment: only a number if the head is damaged, None if the file has no record."""
    is_empty = True
    for _, _, record in read_records(path):
        is_empty = False
        if isinstance(record, SegmentHead):
            return record
        if not isinstance(record, DamagedPart) or record.at:  # after a damaged first line, the head may be intact
            break
    if is_empty:
        return None
    if name := _NUMBERED.fullmatch("journal" + path.suffix):
        return SegmentHead(int(name[1]), 0, "", "")
    after = max((number + 1 for number, _ in _numbered_files(path, _NUMBERED)), default=1)
    return SegmentHead(max([after, *(number for number, _ in list_snapshots(path))]), 0, "", "")


def incomplete_files(journal: Path) -> Iterator[Path]:
    for path in _files_of_journal(journal):
        if path.name.endswith(".draft") or path.name == f"{journal.name}.{NEXT}":
            yield path


def older_files(journal: Path, than: int) -> Iterator[Path]:
    for number, path in (*_numbered_files(journal, _NUMBERED), *list_snapshots(journal)):
        if number < than:
            yield path


def journal_files(journal: Path) -> list[Path]:
    numbered = [path for _, path in (*_numbered_files(journal, _NUMBERED), *list_snapshots(journal))]
    return [path for path in (journal, *numbered) if path.exists()]


def _numbered_files(journal: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    for path in _files_of_journal(journal):
        if name := pattern.fullmatch("journal" + path.name.removeprefix(journal.name)):
            yield int(name[1]), path


def _files_of_journal(journal: Path) -> list[Path]:
    try:
        return sorted(journal.parent.glob(f"{journal.name}.*"))
    except OSError as error:
        raise SessionError(f"no journal at {journal}: {error.strerror}") from error


def remove_old_journals(journal: Path) -> None:
    """Delete the journals that were renamed to `journal.aside-*`, except the last `KEPT_OLD_JOURNALS`."""
    prefix = f"{journal.name}.aside-"
    stamps = {path: path.name[: len(prefix) + _STAMP] for path in journal.parent.glob(f"{prefix}*")}
    kept = sorted(set(stamps.values()))[-KEPT_OLD_JOURNALS:]
    for path, stamp in stamps.items():
        if stamp not in kept:
            path.unlink(missing_ok=True)
