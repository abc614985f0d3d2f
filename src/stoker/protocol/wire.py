"""Encode and decode frames of messages. Invalid data raises ProtocolError and changes nothing.

A frame is a MessagePack array `[sequence, [message, ...]]`, with 0 for an unnumbered frame. Every protocol version has
the same frame shape, hello and refusal, so that peers of two versions get a clear error. A hello is the first message
of its frame: a map with `protocol` and `session`. The refusal is a map with a `reason`.

Each numbered frame is handled exactly once. The sender (`Outbox`) keeps and resends frames until they are acknowledged.
The receiver (`Inbox`) drops frames that it has handled. It also drops frames that skip a number, because the sender
resends such frames after the next hello. A manager that lost the end of its journal lacks frames that it had
acknowledged. The manager then continues from the number in the sender's hello (`Inbox.skip_to`), and requests the lost
content again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import ProtocolError
from stoker.protocol import to_agent, to_client, to_library, to_manager, to_pilot

VERSION = 10

M = TypeVar("M")


class Frame(msgspec.Struct, Generic[M], frozen=True, array_like=True):
    """Messages sent together. `sequence`: number of the frame (0: unnumbered)."""

    sequence: int
    messages: list[M]


class AnyHello(msgspec.Struct, frozen=True):
    protocol: int
    session: str


class Decoder(Generic[M]):
    def __init__(self, union: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(Frame[union]).decode

    def __call__(self, data: Any) -> Frame[M]:
        try:
            return self._decode(data)
        except UNREADABLE as error:
            raise ProtocolError(f"{len(data)} bytes that are not a frame of this protocol: {error}") from None


_encode = msgspec.msgpack.Encoder().encode


def encode(messages: list[Any], *, sequence: int = 0) -> bytes:
    return _encode((sequence, messages))


_any_frame = msgspec.msgpack.Decoder(Frame[msgspec.Raw]).decode
_any_hello = msgspec.msgpack.Decoder(AnyHello).decode


def decode_other_version_hello(data: Any) -> AnyHello | None:
    """Return a hello of another protocol version, or else None."""
    try:
        first = _any_frame(data).messages[:1]
        hello = _any_hello(first[0]) if first else None
    except UNREADABLE:
        return None
    return hello if hello is not None and hello.protocol != VERSION else None


def explain_mismatch(hello: AnyHello | to_manager.ClientHello | to_manager.PilotHello, *, session: str) -> str:
    if hello.protocol == VERSION and hello.session == session:
        return ""
    asked = f"you asked for session {hello.session}, protocol {hello.protocol}"
    more = "" if hello.protocol == VERSION else "; both sides need the same version of Stoker"
    return f"this is session {session}, protocol {VERSION}; {asked}{more}"


from_client_decoder: Callable[[], Decoder[to_manager.FromClient]] = partial(Decoder, to_manager.FromClient)
from_pilot_decoder: Callable[[], Decoder[to_manager.FromPilot]] = partial(Decoder, to_manager.FromPilot)
to_pilot_decoder: Callable[[], Decoder[to_pilot.ToPilot]] = partial(Decoder, to_pilot.ToPilot)
to_client_decoder: Callable[[], Decoder[to_client.ToClient]] = partial(Decoder, to_client.ToClient)
to_library_decoder: Callable[[], Decoder[to_library.ToLibrary]] = partial(Decoder, to_library.ToLibrary)
to_agent_decoder: Callable[[], Decoder[to_agent.ToAgent]] = partial(Decoder, to_agent.ToAgent)


# ---- numbered frames


class Outbox:
    """Numbers the frames to send, and keeps each frame until the receiver has acknowledged it."""

    def __init__(self) -> None:
        self.sequence = 0
        self.acknowledged = 0
        """Number of the last frame that the receiver has acknowledged."""
        self._unacked: deque[tuple[int, bytes]] = deque()

    def take_next_number(self) -> int:
        self.sequence += 1
        return self.sequence

    def keep(self, sequence: int, frame: bytes) -> None:
        self._unacked.append((sequence, frame))

    def acknowledge(self, sequence: int) -> None:
        if sequence > self.sequence:  # the peer is wrong: no such frame was sent
            return
        self.acknowledged = max(self.acknowledged, sequence)
        unacked = self._unacked
        while unacked and unacked[0][0] <= sequence:
            unacked.popleft()

    def unacknowledged_frames(self) -> list[bytes]:
        return [frame for _, frame in self._unacked]

    def take_unacknowledged_frames(self) -> list[bytes]:
        """Remove and return the unacknowledged frames. The next new frames reuse their numbers."""
        frames = self.unacknowledged_frames()
        self._unacked.clear()
        self.sequence = self.acknowledged
        return frames


class Inbox:
    """Checks the order of received frames by their numbers."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.lost_handled_frames = False
        """True if the record of handled frames is lost (`RecordsLost`). Until the next hello, frame numbers may then
        have gaps.
        """

    def accept(self, sequence: int) -> bool:
        if sequence == 0:
            return True
        if sequence != self.last + 1 and not (self.lost_handled_frames and sequence > self.last):
            return False
        self.last = sequence
        return True

    def skip_to(self, sequence: int) -> bool:
        """Expect the frame after number `sequence` next, because the sender no longer has earlier frames. Return True
        if the receiver has lost frames that it had acknowledged. If it had handled later frames, it handles them again.
        """
        lost = sequence > self.last or self.lost_handled_frames
        self.last = sequence if self.lost_handled_frames else max(self.last, sequence)
        self.lost_handled_frames = False
        return lost
