"""Frames of messages. Data outside the protocol raises ProtocolError and changes nothing.

A frame is a MessagePack array `[sequence, [message, ...]]`; sequence 0 means that the frame is not numbered.

Three things are the same in every version, so that peers of two versions part with a clear error: the shape of a
frame; a hello, which is a map with `protocol` and `session` and the first message of its frame; and the answer
`refused`, a map with a `reason`.

Numbered frames are neither lost nor handled twice. The sender (`Outbox`) keeps each frame until it is acknowledged,
and sends the rest again after a reconnect. The receiver (`Inbox`) handles frames in order: it drops a frame that it
has handled, and refuses one that skips a number (its predecessors were lost with a connection and are sent again after
the next hello).

The receiver may lose frames that it had acknowledged: a manager restarted with a shorter journal. So a hello states up
to which number the sender's frames were acknowledged, because the sender no longer has them. A receiver that has
handled fewer continues from that number (`Inbox.skip_to`), and asks its peer to repeat the content of the lost frames.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import ProtocolError
from stoker.protocol import to_agent, to_client, to_library, to_manager, to_pilot

VERSION = 9
"""Part of every hello: peers of another version are refused."""

M = TypeVar("M")


class Frame(msgspec.Struct, Generic[M], frozen=True, array_like=True):
    """`sequence`: 0, or the frame's number among its sender's."""

    sequence: int
    messages: list[M]


class AnyHello(msgspec.Struct, frozen=True):
    """The common part of hellos of every version."""

    protocol: int
    session: str


class Decoder(Generic[M]):
    def __init__(self, union: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(Frame[union]).decode

    def __call__(self, data: Any) -> Frame[M]:
        """Decode bytes or a memoryview. Raises ProtocolError with the name of the wrong field."""
        try:
            return self._decode(data)
        except UNREADABLE as error:
            raise ProtocolError(f"{len(data)} bytes that are not a frame of this protocol: {error}") from None


_encode = msgspec.msgpack.Encoder().encode


def encode(messages: list[Any], *, sequence: int = 0) -> bytes:
    return _encode((sequence, messages))


_any_frame = msgspec.msgpack.Decoder(Frame[msgspec.Raw]).decode
_any_hello = msgspec.msgpack.Decoder(AnyHello).decode


def hello_of_another(data: Any) -> AnyHello | None:
    """Return the hello of another protocol version in a frame, or None."""
    try:
        first = _any_frame(data).messages[:1]
        hello = _any_hello(first[0]) if first else None
    except UNREADABLE:
        return None
    return hello if hello is not None and hello.protocol != VERSION else None


def why_not(hello: AnyHello | to_manager.ClientHello | to_manager.PilotHello, *, session: str) -> str:
    """Return why the sender of a hello cannot join the session; empty if it can."""
    if hello.protocol == VERSION and hello.session == session:
        return ""
    asked = f"you asked for session {hello.session}, protocol {hello.protocol}"
    more = "" if hello.protocol == VERSION else "; both sides need the same version of Stoker"
    return f"this is session {session}, protocol {VERSION}; {asked}{more}"


def from_client() -> Decoder[to_manager.FromClient]:
    return Decoder(to_manager.FromClient)


def from_pilot() -> Decoder[to_manager.FromPilot]:
    return Decoder(to_manager.FromPilot)


def to_pilot_decoder() -> Decoder[to_pilot.ToPilot]:
    return Decoder(to_pilot.ToPilot)


def to_client_decoder() -> Decoder[to_client.ToClient]:
    return Decoder(to_client.ToClient)


def to_library_decoder() -> Decoder[to_library.ToLibrary]:
    return Decoder(to_library.ToLibrary)


def to_agent_decoder() -> Decoder[to_agent.ToAgent]:
    return Decoder(to_agent.ToAgent)


# ---- numbered frames


class Outbox:
    """The sender of numbered frames."""

    def __init__(self) -> None:
        self.sequence = 0
        self.acknowledged = 0
        """The highest acknowledged number: frames up to it are not kept."""
        self._unacked: deque[tuple[int, bytes]] = deque()

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    def keep(self, sequence: int, frame: bytes) -> None:
        self._unacked.append((sequence, frame))

    def acked(self, sequence: int) -> None:
        if sequence > self.sequence:  # an acknowledgement of frames that were never sent
            return
        self.acknowledged = max(self.acknowledged, sequence)
        unacked = self._unacked
        while unacked and unacked[0][0] <= sequence:
            unacked.popleft()

    def unacked(self) -> list[bytes]:
        """Return the frames to send again, oldest first."""
        return [frame for _, frame in self._unacked]

    def begin_again(self) -> list[bytes]:
        """Forget the unacknowledged frames and reuse their numbers. Return them: their content must be sent again."""
        frames = self.unacked()
        self._unacked.clear()
        self.sequence = self.acknowledged
        return frames


class Inbox:
    """The receiver of numbered frames."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.has_hole = False
        """True if handled frames are lost (see `RecordsLost`): until the next hello any later frame is accepted."""

    def accept(self, sequence: int) -> bool:
        """True if a frame with this number is to be handled. Frames without a number (0) always are."""
        if sequence == 0:
            return True
        if sequence != self.last + 1 and not (self.has_hole and sequence > self.last):
            return False
        self.last = sequence
        return True

    def skip_to(self, sequence: int) -> bool:
        """Accept that the sender keeps no frame up to this number. Return True if acknowledged frames were lost here.

        Frames that were handled after a hole are handled again when they are repeated: they describe what happened
        since the hello, and may have had no meaning before it.
        """
        lost = sequence > self.last or self.has_hole
        self.last = sequence if self.has_hole else max(self.last, sequence)
        self.has_hole = False
        return lost
