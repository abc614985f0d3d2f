"""Garbage from peers that hold a valid key: the manager refuses it, says so seldom, and goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from live.peers import Manager, Peer, pilot_hello, until

from stoker.errors import ProtocolError, SessionError
from stoker.manager.executor.client import Link
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.session import SessionFile, SessionFolder

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


NO_NAMES = [b"\xff\xfe-pilot", b"~0123456789abcdef", b"n1\nWARNING pilot n2 is lost", b""]
"""Identities of connections that name no peer. For an empty one ZeroMQ makes one: a zero and four bytes of any kind."""


def test_a_peer_without_a_readable_name_is_refused_and_ends_nothing(
    folder: SessionFolder, manager: Manager, peers: Callable[..., Peer]
) -> None:
    """Bytes that are not UTF-8 ended the manager when their connection broke. The loss of a pilot with an empty name
    was taken for a first client that never came, which ends the session."""
    client = peers("client")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client.hear(to_client.ClientWelcome)
    there, pair = folder.read(), folder.read_key("pilot")
    opened = []
    for identity in NO_NAMES:
        rude = context.socket(zmq.DEALER)
        opened.append(rude)  # one that nobody has is closed
        rude.curve_serverkey, rude.linger = there.server_key.encode(), 0
        rude.curve_publickey, rude.curve_secretkey = pair.public.encode(), pair.secret.encode()
        if identity:
            rude.routing_id = identity
        rude.connect(there.address)
        rude.send(wire.encode([pilot_hello(there.session)]))

    def refused() -> int:
        client.send(say.AskStatus(), numbered=False)
        return client.hear(to_client.Status).refused.get("frame that is not in the protocol", 0)

    try:
        until(lambda: refused() == len(NO_NAMES), what="all are refused")
    finally:
        context.destroy(0)
    late = peers("pilot")
    late.hear(to_pilot.PilotWelcome)
    late.close()  # its connection breaks after theirs, and it is given up after they would be
    until(lambda: f"pilot {late.name} did not come back" in folder.manager_log.read_text(), what="the loss of a pilot")
    assert manager.process is not None
    assert manager.process.poll() is None
    client.send(say.AskStatus(), numbered=False)
    assert [pilot.pilot for pilot in client.hear(to_client.Status).pilots] == []


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
