"""Garbage from peers that hold a valid key: the manager refuses it, says so seldom, and goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from live.peers import Manager, Peer, until

from stoker.errors import ProtocolError, SessionError
from stoker.manager.executor.link import Link
from stoker.manager.protocol import to_client, wire
from stoker.manager.protocol import to_manager as say
from stoker.manager.protocol.session import SessionFile, SessionFolder

_BAD_TEXT = b"\xa2\xff\xfe"
"""A MessagePack string of two bytes that are not UTF-8."""
GARBAGE = {
    "empty": b"",
    "noise": random.Random(8).randbytes(500),
    "text that is not UTF-8": b"\x92\x00\x91\x81\xa4type" + _BAD_TEXT,
    "a key that is not UTF-8": b"\x92\x00\x91\x81" + _BAD_TEXT + b"\x01",
    "nested deep": b"\x92\x00" + b"\x91" * 100_000 + b"\x00",
    "a length that no machine has": b"\x92\x00\xdd\xff\xff\xff\xff",
    "a hello that is not UTF-8": b"\x92\x00\x91\x83\xa4type\xaapilot-hell\xa8protocol\x01\xa7session" + _BAD_TEXT,
    "a sequence too large": b"\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x90",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_every_reader_refuses_it_with_its_own_error(name: str) -> None:
    for reader in (
        wire.from_client(),
        wire.from_pilot(),
        wire.to_pilot_decoder(),
        wire.to_client_decoder(),
        wire.to_library_decoder(),
        wire.to_agent_decoder(),
    ):
        if name != "a sequence too large":
            with pytest.raises(ProtocolError):
                reader(GARBAGE[name])
    assert wire.hello_of_another(GARBAGE[name]) is None


@pytest.mark.parametrize("role", ["client", "pilot"])
def test_a_manager_outlives_garbage_from_a_peer_with_a_key(
    role: str, folder: SessionFolder, manager: Manager, peers: Callable[..., Peer]
) -> None:
    rude, kind = peers(role), peers("client")
    kind.hear(to_client.ClientWelcome)
    for _ in range(50):
        for frame in GARBAGE.values():
            rude.socket.send(frame)
    cut = wire.encode([say.ClientHello(wire.VERSION, kind.session)])
    for end in range(len(cut)):
        rude.socket.send(cut[:end])
    kind.send(say.AskStatus(), numbered=False)
    kind.hear(to_client.Status)
    assert manager.process is not None
    assert manager.process.poll() is None

    def lines() -> list[str]:
        return [line for line in folder.manager_log.read_text().splitlines() if "refused a frame" in line]

    until(lines, what="a line about the frames, which may be read after the other peer's")
    assert len(lines()) <= 5, "one line in ten seconds about one peer"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"public": "x", "secret": "y"}', None])
def test_damaged_keys_of_a_session_are_told_with_what_to_do(folder: SessionFolder, data: bytes | None) -> None:
    """Keys of the wrong length were a traceback of ZeroMQ, in `stoker down` too."""
    server = folder.read_key("server")
    folder.write(SessionFile("test", wire.VERSION, "tcp://127.0.0.1:1", server.public))
    file = folder.key_file("client")
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    with pytest.raises(SessionError) as caught:
        Link(folder)
    assert "client.json" in str(caught.value)
    assert "is damaged: " in str(caught.value) or data is None
    assert "without it no program or command can join the session" in str(caught.value)
    assert str(folder.lease) in str(caught.value)
    assert folder.read_key("server") == server


def test_damaged_files_of_a_session_are_told_as_such(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    for data in (b"{", b'{"session": "\xff"}', b"[" * 100_000, msgspec.json.encode({"session": 1})):
        folder.file.write_bytes(data)
        with pytest.raises(Exception, match=r"session\.json is damaged") as caught:
            folder.read()
        assert type(caught.value).__name__ == "SessionError"
