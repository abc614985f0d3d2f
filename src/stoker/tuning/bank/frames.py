"""An append-only file of records, each with its checksum, that survives the death of its writer at any moment.

Every record is a frame: its length, the checksum of its bytes, a checksum of these two (4 bytes each, little-endian),
its bytes. A batch of records is one `write(2)`, then `fsync`. What follows the last whole frame is one of two things:

- *torn*: the beginning of a frame, or zeros, or a last frame with other bytes in it. A killed writer or a crashed host
  leaves that. It was never acknowledged; the next writer cuts it off.
- *damaged*: anything else, for which no writer that died is an explanation. It is told, and never cut off unasked.

A reader needs no lock: it takes what is whole. Writers take turns by a lock of their own (`store.py`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from struct import Struct

import msgspec

from stoker.errors import StokerError

_HEAD = Struct("<III")


class RecordsRead(msgspec.Struct, frozen=True):
    """Records from the byte `start` on; `end` is where the last whole one ends; `damaged`: whether what follows is more
    than a torn write."""

    payloads: list[bytes]
    start: int
    end: int
    damaged: bool = False


def frame(payload: bytes) -> bytes:
    """The bytes of one record."""
    start = _HEAD.pack(len(payload), zlib.crc32(payload), 0)[:8]
    return start + zlib.crc32(start).to_bytes(4, "little") + payload


def read(path: Path, *, start: int = 0, beginning: bytes = b"", skip: bool = False) -> RecordsRead:
    """The whole records from the byte `start` on, which is where a frame begins.

    From the first byte, if the file does not begin with `beginning` any more, or does not reach `start`: another file
    has been put in its place. With `skip`, a record whose bytes are damaged is passed over, and what follows is
    read. Raises OSError.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < start or file.read(len(beginning)) != beginning:
            start = 0
        file.seek(start)
        data = file.read()
    payloads: list[bytes] = []
    at, skipped = 0, False
    while True:
        rest = len(data) - at
        if rest < _HEAD.size or not any(data[at : at + _HEAD.size]):
            return RecordsRead(payloads, start, start + at, damaged=skipped or (rest >= _HEAD.size and any(data[at:])))
        length, check, check_of_head = _HEAD.unpack_from(data, at)
        if zlib.crc32(data[at : at + 8]) != check_of_head:
            return RecordsRead(payloads, start, start + at, damaged=True)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length or zlib.crc32(payload) != check:
            is_last = rest <= _HEAD.size + length
            if is_last or not skip:
                return RecordsRead(payloads, start, start + at, damaged=skipped or not is_last)
            skipped = True
        else:
            payloads.append(payload)
        at += _HEAD.size + length


def append(path: Path, payloads: Iterable[bytes], *, at: int) -> int:
    """Write records behind the byte `at`, where the last whole one ends; what is torn behind it goes. The new end.

    The caller is the only writer. Raises StokerError when the disk refuses, and then none of them is there.
    """
    data = b"".join(map(frame, payloads))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(file, at)
        os.lseek(file, at, os.SEEK_SET)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, at)
            raise StokerError(
                f"{path}: cannot be written: {error.strerror}; what was in it before is kept", file=str(path)
            ) from error
    finally:
        os.close(file)
    return at + len(data)


def replace(path: Path, payloads: Iterable[bytes]) -> int:
    """Put a file of these records in the place of `path`, whole or not at all. Its end. Raises as `append`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        end = append(draft, payloads, at=0)
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        draft.unlink(missing_ok=True)
    return end
