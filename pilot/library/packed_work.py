"""Encodes the work of an engine as bytes. A checksum detects half-written data, as agent and library use no lock."""

from __future__ import annotations

import struct
import zlib

import msgspec

from stoker.contexts.inference.adapter import EngineWork
from stoker.decoding import UNREADABLE
from stoker.protocol.ids import LibraryId

MOST_PROMPTS = 32  # maximum number of listed prompts; the last entry merges all remaining prompts
MOST_ANSWERS = 32  # maximum number of listed answers; an engine with more answers lists none
_HEAD = struct.Struct("<II")  # checksum, and length of the rest
WORK_BYTES = _HEAD.size + 128 + 37 * MOST_PROMPTS + 28 * MOST_ANSWERS  # at most 9 bytes per number, and 1 byte per list
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[LibraryId, EngineWork]).decode


def packed(library: LibraryId, work: EngineWork) -> bytes:
    prompts = work.prompts
    if len(prompts) > MOST_PROMPTS:
        rest = prompts[MOST_PROMPTS - 1 :]
        merged = (sum(tokens for tokens, *_ in rest), *rest[-1][1:3], 0)
        work = work._replace(prompts=[*prompts[: MOST_PROMPTS - 1], merged])
    if len(work.answers) > MOST_ANSWERS:
        work = work._replace(answers=())
    data = _encode((library, work))
    return _HEAD.pack(zlib.crc32(data), len(data)) + data


def unpacked(data: bytes) -> tuple[LibraryId, EngineWork] | None:
    """Decode a library id and the work of its engine. Return None if the bytes are damaged."""
    checksum, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size : _HEAD.size + length]
    if zlib.crc32(body) != checksum:
        return None
    try:
        return _decode(body)
    except UNREADABLE:
        return None
