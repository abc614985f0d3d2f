"""Every event of a session, in order, on disk before anything that follows from it is said to anybody.

A record is `length (4 bytes) | crc32 (4 bytes) | MessagePack [now, event]`, little endian. Records of one turn of the
loop are written with one `write(2)`: they survive a killed process (surviving a host crash is the option `sync`). A
record that was cut off by a crash is dropped when the journal is opened again; everything before it counts.

Now and then a record says what the core decided about the events before it, a check each (`decisions`): so a replay
knows where it decides otherwise. What a manager decided last before it was killed may lack its check. Journals of
before there were checks are read as any other.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.manager.core.events import Event

_HEAD = struct.Struct("<II")
_MAGIC = b"stoker journal 1\n"
CHECKS = 64
"""So many checks are collected before they are written with the next turn,"""
CHECKS_S = 0.2
"""or those of so many seconds, if that is sooner."""

MOST_CHECKS = 10_000
"""A turn of the loop has fewer events than this."""


class Decided(msgspec.Struct, frozen=True, tag="decided", array_like=True):
    """What was decided about the journal's events from number `first` on (from 0): 4 bytes each, little endian."""

    first: int
    checks: bytes

    def numbered(self) -> Iterator[tuple[int, int]]:
        """The events' numbers, and their checks."""
        return enumerate(_numbers(self.checks), self.first)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[float, Event | Decided]).decode


class Journal:
    """The writing side. `write` collects, `flush` puts on disk. Raises SessionError where the disk does not take it."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path = path
        self.sync = sync
        self._pending: list[bytes] = []
        self._checks, self._first = array("I"), 0
        self._checked_at = self._now = 0.0
        whole = 0
        self._events = 0
        """Written so far, those of managers before this one included."""
        for length, _, record in _records(path) if path.exists() else ():
            whole += length
            self._events += not isinstance(record, Decided)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise SessionError(f"{path.parent} already has a manager; one session has one manager") from None
        if whole:
            os.ftruncate(self._fd, len(_MAGIC) + whole)
        else:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, _MAGIC)

    def write(self, now: float, event: Event) -> None:
        """Remember an event; `flush` makes it last."""
        self._now = now
        self._events += 1
        self._append(now, event)

    def take_back(self) -> None:
        """Forget the event that was written last and is not on disk: the core could not handle it."""
        del self._pending[-2:]
        self._events -= 1

    def decided(self, check: int) -> None:
        """Remember what was decided about the event that was written last."""
        if not self._checks:
            self._first = self._events - 1
        self._checks.append(check)

    def _append(self, now: float, record: Event | Decided) -> None:
        body = _encode((now, record))
        self._pending.append(_HEAD.pack(len(body), zlib.crc32(body)))
        self._pending.append(body)

    def _append_checks(self) -> None:
        checks = self._checks
        if not checks:
            return
        self._append(self._now, Decided(self._first, _as_bytes(checks)))
        self._checks, self._checked_at = array("I"), self._now

    def flush(self) -> None:
        """Put what was written on disk."""
        if len(self._checks) >= CHECKS or self._now - self._checked_at >= CHECKS_S:
            self._append_checks()
        if not self._pending:
            return
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            if self.sync:
                os.fdatasync(self._fd)
        except OSError as error:
            raise SessionError(
                f"the journal {self.path} cannot be written: {error.strerror}; make room there"
            ) from error

    def close(self) -> None:
        """Put what is left on disk and let go of the file."""
        self._append_checks()
        self.flush()
        os.close(self._fd)


def read(path: Path) -> Iterator[tuple[float, Event]]:
    """The events of a journal, oldest first; a record that was cut off ends it. Raises SessionError if it is none."""
    for now, record in read_checked(path):
        if not isinstance(record, Decided):
            yield now, record


def read_checked(path: Path) -> Iterator[tuple[float, Event | Decided]]:
    """The same, and what was decided about them: some time after the events that it is about."""
    for _, now, record in _records(path):
        yield now, record


def _as_bytes(checks: array[int]) -> bytes:
    if sys.byteorder == "big":
        checks.byteswap()
    return checks.tobytes()


def _numbers(checks: bytes) -> array[int]:
    numbers = array("I", checks[: len(checks) // 4 * 4])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _records(path: Path) -> Iterator[tuple[int, float, Event | Decided]]:
    """Length on disk, time and content of each whole record."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise SessionError(f"no journal at {path}: {error.strerror}") from error
    with file:
        if file.read(len(_MAGIC)) != _MAGIC:
            if path.stat().st_size <= len(_MAGIC):
                return
            raise SessionError(f"{path} is not a journal of this version")
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            body = file.read(length)
            if len(body) < length or zlib.crc32(body) != crc:
                return
            try:
                now, record = _decode(body)
            except UNREADABLE as error:
                raise SessionError(f"{path} was written by another version: {error}") from error
            yield _HEAD.size + length, now, record
