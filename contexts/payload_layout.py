"""How a pickle and its out-of-band buffers lie in the bytes of a payload (`payloads`). Nothing is unpickled here, so
managers and pilots can look at a payload's pickle without what travels by value needs."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from stoker.errors import SerializationError

Buffer = bytes | bytearray | memoryview

PLAIN = b"\x80"
"""The first byte of a payload that is a plain pickle."""
_MAGIC, _VERSION, _ALIGN = b"B", 1, 64
_HEAD = struct.Struct("<cBHI")  # magic, version, unused, number of buffers
_ENTRY = struct.Struct("<QQ?7x")  # offset, length, writable


def laid_out(body: bytes, raws: Sequence[memoryview]) -> list[Buffer]:
    """A payload with buffers, in pieces: a head with a table, then the pickle and each buffer where the table says."""
    offset = _HEAD.size + _ENTRY.size * (1 + len(raws))
    table, parts = [], list[Buffer]()
    for raw, writable in [(memoryview(body), False), *((raw, not raw.readonly) for raw in raws)]:
        gap = -offset % _ALIGN
        offset += gap
        table.append(_ENTRY.pack(offset, raw.nbytes, writable))
        parts += [bytes(gap), raw]
        offset += raw.nbytes
    return [_HEAD.pack(_MAGIC, _VERSION, 0, len(raws)) + b"".join(table), *parts]


def taken_apart(data: Buffer) -> tuple[Buffer, list[Buffer]]:
    """The pickle and the buffers of such a payload. A buffer that was writable is a view of `data` if that is writable
    memory, else a copy. Raises SerializationError for what `laid_out` has not made."""
    if data[:1] != _MAGIC:
        raise SerializationError(f"{len(data)} bytes that are not a pickled value", what="payload")
    view = memoryview(data)
    try:
        _, version, _, count = _HEAD.unpack_from(view)
        table = [_ENTRY.unpack_from(view, _HEAD.size + _ENTRY.size * index) for index in range(count + 1)]
    except struct.error as error:
        raise SerializationError(f"a pickled value of {len(data)} bytes is cut short", what="payload") from error
    if version != _VERSION or any(offset + length > len(view) for offset, length, _ in table):
        raise SerializationError(f"a pickled value of {len(data)} bytes is damaged or cut short", what="payload")
    body, *buffers = (_part(view[offset : offset + length], writable=writable) for offset, length, writable in table)
    return body, buffers


def _part(part: memoryview, *, writable: bool) -> Buffer:
    if not writable:
        return part.toreadonly()
    return bytearray(part) if part.readonly else part


def body_of(data: bytes) -> tuple[bytes, int]:
    """The pickle within a payload, and how many out-of-band buffers it has. Raises SerializationError."""
    if data[:1] == PLAIN:
        return data, 0
    try:
        _, version, _, count = _HEAD.unpack_from(data)
        offset, length, _ = _ENTRY.unpack_from(data, _HEAD.size)
    except struct.error as error:
        raise SerializationError(f"{len(data)} bytes that are not a pickled value", what="payload") from error
    if data[:1] != _MAGIC or version != _VERSION or offset + length > len(data):
        raise SerializationError(f"{len(data)} bytes that are not a pickled value", what="payload")
    return data[offset : offset + length], count
