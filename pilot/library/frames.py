"""Frames over a Unix socket: a head of eight bytes, then a frame of `wire`.

The head is the frame's length in five bytes (little endian) and a mark of three. User code runs in a process that has
this socket among its descriptors, and may write to it by mistake: a head without the mark, or with a length that no
frame has, is no frame. The reader says so at once; it does not wait for bytes that never come, and takes no memory.

The reader works for both ends: the library's blocks, the agent's never does.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from stoker.errors import ProtocolError

_HEAD = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size
_LENGTH_BITS = 40
_MARK = 0xD7A5C1 << _LENGTH_BITS
"""No text in UTF-8 or ASCII holds these three bytes."""
MOST_BYTES = 1 << 32
"""No frame is longer: MessagePack ends there too."""
_ROOM = 1 << 18
_encode_into = msgspec.msgpack.Encoder().encode_into


def pack(messages: list[Any]) -> bytearray:
    """Messages as the bytes of one frame, its length before it."""
    out = bytearray(HEAD_BYTES)
    _encode_into((0, messages), out, HEAD_BYTES)
    _HEAD.pack_into(out, 0, _MARK | len(out) - HEAD_BYTES)
    return out


def pack_raw(body: bytes) -> bytes:
    """Bytes as a frame."""
    return _HEAD.pack(_MARK | len(body)) + body


def length_of(head: bytes | bytearray, start: int = 0) -> int:
    """The length of the frame whose head begins there. Raises ProtocolError for bytes that are no head."""
    (said,) = _HEAD.unpack_from(head, start)
    length: int = said ^ _MARK
    if length > MOST_BYTES:
        raise ProtocolError(f"{bytes(head[start : start + HEAD_BYTES])!r} where a frame should begin")
    return length


class FrameReader:
    """Cuts what arrives on a socket into frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_ROOM)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def fill(self, *, block: bool) -> bool:
        """Take what has arrived; False at the end of the stream. Raises BlockingIOError if nothing has."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > 16 * _ROOM:
                self._resize(_ROOM)
        elif self._start and self._end == len(self._buffer):
            self._resize(len(self._buffer))
        count = self._sock.recv_into(self._view[self._end :], 0, 0 if block else socket.MSG_DONTWAIT)
        self._end += count
        return count > 0

    def next(self) -> memoryview | None:
        """The next whole frame, valid until the next `fill`; None when there is none yet. Raises ProtocolError for
        bytes that are no frame."""
        here = self._end - self._start
        if here < HEAD_BYTES:
            self._make_room(HEAD_BYTES)
            return None
        length = length_of(self._buffer, self._start)
        if here < HEAD_BYTES + length:
            self._make_room(HEAD_BYTES + length)
            return None
        first = self._start + HEAD_BYTES
        self._start = first + length
        return self._view[first : self._start]

    def _make_room(self, frame_bytes: int) -> None:
        """Have room for more of a frame. The room grows with what has come: a length alone takes no memory."""
        if self._start + frame_bytes <= len(self._buffer):
            return
        here = self._end - self._start
        if self._end == len(self._buffer) or self._start:
            self._resize(min(max(_ROOM, frame_bytes), max(_ROOM, 4 * here)))

    def _resize(self, size: int) -> None:
        fresh = bytearray(size)
        here = self._end - self._start
        fresh[:here] = self._view[self._start : self._end]
        self._buffer, self._view = fresh, memoryview(fresh)
        self._start, self._end = 0, here
