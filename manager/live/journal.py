"""Every event of a session, in order, on disk before anything that follows from it is said to anybody.

A record is `length (4 bytes) | crc32 (4 bytes) | MessagePack [now, event]`, little endian. Records of one turn of the
loop are written with one `write(2)`: they survive a killed process (surviving a host crash is the option `sync`). A
record that was cut off by a crash is dropped when the journal is opened again; everything before it counts.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.core.events import Event

_HEAD = struct.Struct("<II")
_MAGIC = b"stoker journal 1\n"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[float, Event]).decode


class Journal:
    """The writing side. `write` collects, `flush` puts on disk. Raises SessionError where the disk does not take it."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path = path
        self.sync = sync
        self._pending: list[bytes] = []
        whole = sum(length for length, _, _ in _records(path)) if path.exists() else 0
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
        body = _encode((now, event))
        self._pending.append(_HEAD.pack(len(body), zlib.crc32(body)))
        self._pending.append(body)

    def flush(self) -> None:
        """Put what was written on disk."""
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
        self.flush()
        os.close(self._fd)


def read(path: Path) -> Iterator[tuple[float, Event]]:
    """The events of a journal, oldest first; a record that was cut off ends it. Raises SessionError if it is none."""
    for _, now, event in _records(path):
        yield now, event


def _records(path: Path) -> Iterator[tuple[int, float, Event]]:
    """Length on disk, time and event of each whole record."""
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
                now, event = _decode(body)
            except msgspec.DecodeError as error:
                raise SessionError(f"{path} was written by another version: {error}") from error
            yield _HEAD.size + length, now, event
