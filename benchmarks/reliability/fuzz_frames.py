"""Readers of what travels between processes, for the fuzzers: frames, the library's socket, the zygote's messages."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from benchmarks.reliability.fuzz_inputs import Target, value_of
from stoker.decoding import UNREADABLE
from stoker.errors import ProtocolError
from stoker.pilot.library import frames
from stoker.pilot.library import settings as library_settings
from stoker.pilot.zygote import client as zygote_client
from stoker.pilot.zygote import messages as zygote
from stoker.pilot.zygote import server as zygote_server
from stoker.protocol import to_agent, to_client, to_library, to_manager, to_pilot, wire

_pack = msgspec.msgpack.Encoder().encode


def frame_targets(chance: random.Random) -> list[Target]:
    """Readers of messages between processes."""
    return [*_frames(chance), _library_frames(chance), *_zygotes(chance), _settings(chance)]


def _messages(union: Any, chance: random.Random) -> list[bytes]:
    """Frames with each kind of message, some with several."""
    kinds = union.__args__ if hasattr(union, "__args__") else (union,)
    found = []
    for _ in range(4):
        for kind in kinds:
            with suppress(ValueError):
                found.append(wire.encode([value_of(kind, chance)], sequence=chance.randrange(100)))
        with suppress(ValueError):
            found.append(wire.encode([value_of(chance.choice(kinds), chance) for _ in range(3)]))
    return found


def _frames(chance: random.Random) -> list[Target]:
    readers: dict[str, tuple[Any, Any]] = {
        "manager, of a client": (wire.from_client, to_manager.FromClient),
        "manager, of a pilot": (wire.from_pilot, to_manager.FromPilot),
        "pilot, of the manager": (wire.to_pilot_decoder, to_pilot.ToPilot),
        "client, of the manager": (wire.to_client_decoder, to_client.ToClient),
        "library, of the agent": (wire.to_library_decoder, to_library.ToLibrary),
        "agent, of a library": (wire.to_agent_decoder, to_agent.ToAgent),
    }
    found = []
    for name, (make, union) in readers.items():
        right = _messages(union, chance)
        found.append(
            Target(f"frame: {name}", read=_with_hello(make()), declared=(ProtocolError,), right=right, share=12)
        )
    return found


def _with_hello(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """As the manager does: what cannot be read may be the hello of another version."""

    def both(data: bytes) -> object:
        try:
            return read(data)
        except ProtocolError:
            wire.hello_of_another(data)
            raise

    return both


def _library_frames(chance: random.Random) -> Target:
    decode = wire.to_agent_decoder()
    right = [frames.pack_raw(data) for data in _messages(to_agent.ToAgent, chance)]
    right += [b"".join(right[start : start + 3]) for start in range(0, len(right) - 3, 3)]

    def read(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[:100_000])
            theirs.close()
            reader = frames.FrameReader(ours)
            while reader.fill(block=False):
                while (frame := reader.next()) is not None:
                    decode(frame)

    return Target("library's socket", read=read, declared=(ProtocolError,), right=right, share=4)


def _zygotes(chance: random.Random) -> list[Target]:
    found = []
    for name, union, decode in (
        ("zygote, of the agent", zygote.ToZygote, zygote_server._decode),
        ("agent, of a zygote", zygote.FromZygote, zygote_client._decode),
    ):
        right = [_pack(value_of(kind, chance)) for kind in union.__args__ for _ in range(5)]
        found.append(Target(f"message: {name}", read=decode, declared=UNREADABLE, right=right, share=2))
    return found


def _settings(chance: random.Random) -> Target:
    right = [_pack(value_of(library_settings.Settings, chance)) for _ in range(8)]
    return Target("library's settings", read=library_settings.decode, declared=UNREADABLE, right=right)
