"""Records in a journal's file: how one is written, and how they are read from a file that a disk has damaged.

A record is `length (4 bytes) | crc32 (4 bytes) | MessagePack [now, event]`, little endian. A file begins with a line
that says what it is, and a record that says which segment of the journal it is (`SegmentHead`; `segments` has the
rest).

A record whose checksum is wrong, or that cannot be decoded, is damaged. The reader looks for the next whole record
behind it: each begins with the two bytes that MessagePack has for a pair with a time in front, and its checksum must
fit. Where no whole record follows, the file was cut off there.
"""

from __future__ import annotations

import mmap
import operator
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.core.events import Event

HEAD = struct.Struct("<II")
MAGIC = b"stoker journal 2\n"
OLD_MAGIC = b"stoker journal 1\n"
"""A journal of before there were segments: one file, which does not say by which Stoker it was written."""
_OTHER_MAGIC = re.compile(rb"stoker journal [0-9]+(\n|\Z)")
_PAIR_WITH_TIME = b"\x92\xcb"


class Decided(msgspec.Struct, frozen=True, tag="decided", array_like=True):
    """What was decided about the journal's events from number `first` on (from 0): 4 bytes each, little endian."""

    first: int
    checks: bytes

    def numbered(self) -> Iterator[tuple[int, int]]:
        """The events' numbers, and their checks."""
        return enumerate(_numbers(self.checks), self.first)


class SegmentHead(msgspec.Struct, frozen=True, tag="segment", array_like=True):
    """The first record of a segment. `number` counts from 1; `first` is the number of the segment's first event; `mark`
    is drawn anew for each segment, and a snapshot names the segment that follows it by this too; `stoker` is the
    version that began the segment."""

    number: int
    first: int
    mark: str
    stoker: str


class Damage(msgspec.Struct, frozen=True):
    """Bytes that are no record. `tail`: nothing whole follows. `cut`: they look like a record that was not written to
    its end, as a killed process leaves it."""

    at: int
    length: int
    tail: bool
    cut: bool
    why: str


Record = Event | Decided | SegmentHead

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[float, Record]).decode


def encoded(now: float, record: Record) -> tuple[bytes, bytes]:
    """A record's bytes: its head and its body."""
    body = _encode((now, record))
    return HEAD.pack(len(body), zlib.crc32(body)), body


def as_bytes(checks: array[int]) -> bytes:
    """Checks as `Decided` has them."""
    if sys.byteorder == "big":
        checks.byteswap()
    return checks.tobytes()


def _numbers(checks: bytes) -> array[int]:
    numbers = array("I", checks[: len(checks) // 4 * 4])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def scan(path: Path) -> Iterator[tuple[int, float, Record | Damage]]:
    """Each record of a file and each damaged part: where it ends in the file, its time, and itself.

    Raises SessionError if there is no such file, it is no journal, or another version of Stoker wrote it.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise SessionError(f"no journal at {path}: {error.strerror}") from error
    with file:
        size = path.stat().st_size
        magic = file.read(len(MAGIC))
        if magic not in (MAGIC, OLD_MAGIC):
            if size <= len(MAGIC) and MAGIC.startswith(magic):
                return
            if _OTHER_MAGIC.match(magic):
                raise SessionError(f"{path} is not a journal of this version")
            whole = _next_whole(path, 0)
            if whole is None and not _was_magic(magic):
                raise SessionError(f"{path} is not a journal")
            at = size if whole is None else whole
            file.seek(at)
            yield at, 0.0, Damage(0, at, whole is None, cut=False, why="its first line is damaged")
        else:
            at = len(MAGIC)
        now = 0.0
        while at < size:
            head = file.read(HEAD.size)
            length, crc = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
            end = at + HEAD.size + length
            body = file.read(length) if length and end <= size else b""
            if body and zlib.crc32(body) == crc:
                try:
                    now, record = _decode(body)
                    found: Record | Damage = record
                except (ValueError, RecursionError) as error:  # msgspec's DecodeError is a ValueError
                    found = Damage(at, end - at, end >= size, cut=False, why=f"it cannot be decoded: {error}")
            else:
                whole = _next_whole(path, at + 1)
                cut = whole is None and (len(head) < HEAD.size or (length > 0 and end > size))
                end = size if whole is None else whole
                file.seek(end)
                found = Damage(at, end - at, whole is None, cut=cut, why="its checksum is wrong")
            yield end, now, found
            at = end


def _was_magic(first: bytes) -> bool:
    """Whether a damaged disk may have made this of a journal's first line. A page that was never written is zero."""
    return not any(first) or sum(map(operator.eq, first, MAGIC)) > len(MAGIC) // 2


def _next_whole(path: Path, start: int) -> int | None:
    """Where the first whole record begins at or behind `start`, or None."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size, at = len(data), start + HEAD.size
        while (at := data.find(_PAIR_WITH_TIME, at)) >= 0:
            length, crc = HEAD.unpack(data[at - HEAD.size : at])
            if len(_PAIR_WITH_TIME) < length <= size - at and zlib.crc32(data[at : at + length]) == crc:
                return at - HEAD.size
            at += 1
    return None
