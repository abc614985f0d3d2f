"""Batches of messages as frames, and back. What is not in the protocol raises ProtocolError and changes nothing.

A frame is a MessagePack array `[sequence, [message, ...]]`; sequence 0 means that the frame is not numbered.

Three things are the same in every version, so that peers of two versions part with a sentence: that shape of a frame; a
hello, which is a map with `protocol` and `session` in it, and the first message of its frame; and the answer `refused`,
a map with a `reason`.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import ProtocolError
from stoker.protocol import to_agent, to_client, to_library, to_manager, to_pilot

VERSION = 9
"""Said in every hello: peers of another version are refused."""

M = TypeVar("M")


class Frame(msgspec.Struct, Generic[M], frozen=True, array_like=True):
    """Messages that travel together. `sequence` is 0, or numbers the frame among its sender's (see `reliable`)."""

    sequence: int
    messages: list[M]


class AnyHello(msgspec.Struct, frozen=True):
    """What the hellos of every version say."""

    protocol: int
    session: str


class Decoder(Generic[M]):
    """Reads the frames of one kind of peer."""

    def __init__(self, union: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(Frame[union]).decode

    def __call__(self, data: Any) -> Frame[M]:
        """The frame in `data` (bytes or memoryview). Raises ProtocolError, naming the field that is wrong."""
        try:
            return self._decode(data)
        except UNREADABLE as error:
            raise ProtocolError(f"{len(data)} bytes that are not a frame of this protocol: {error}") from None


_encode = msgspec.msgpack.Encoder().encode


def encode(messages: list[Any], *, sequence: int = 0) -> bytes:
    """The frame of these messages."""
    return _encode((sequence, messages))


_any_frame = msgspec.msgpack.Decoder(Frame[msgspec.Raw]).decode
_any_hello = msgspec.msgpack.Decoder(AnyHello).decode


def hello_of_another(data: Any) -> AnyHello | None:
    """The hello in a frame (bytes or memoryview) of another version of the protocol, whatever else it says; None if it
    holds none."""
    try:
        first = _any_frame(data).messages[:1]
        hello = _any_hello(first[0]) if first else None
    except UNREADABLE:
        return None
    return hello if hello is not None and hello.protocol != VERSION else None


def why_not(hello: AnyHello | to_manager.ClientHello | to_manager.PilotHello, *, session: str) -> str:
    """Why whoever says this cannot join a session here; empty: nothing is wrong with it."""
    if hello.protocol == VERSION and hello.session == session:
        return ""
    asked = f"you asked for session {hello.session}, protocol {hello.protocol}"
    more = "" if hello.protocol == VERSION else "; both sides need the same version of Stoker"
    return f"this is session {session}, protocol {VERSION}; {asked}{more}"


def from_client() -> Decoder[to_manager.FromClient]:
    """A reader of what clients send to the manager."""
    return Decoder(to_manager.FromClient)


def from_pilot() -> Decoder[to_manager.FromPilot]:
    """A reader of what pilots send to the manager."""
    return Decoder(to_manager.FromPilot)


def to_pilot_decoder() -> Decoder[to_pilot.ToPilot]:
    """A reader of what the manager sends to pilots."""
    return Decoder(to_pilot.ToPilot)


def to_client_decoder() -> Decoder[to_client.ToClient]:
    """A reader of what the manager sends to clients."""
    return Decoder(to_client.ToClient)


def to_library_decoder() -> Decoder[to_library.ToLibrary]:
    """A reader of what an agent sends to a library."""
    return Decoder(to_library.ToLibrary)


def to_agent_decoder() -> Decoder[to_agent.ToAgent]:
    """A reader of what a library sends to its agent."""
    return Decoder(to_agent.ToAgent)
