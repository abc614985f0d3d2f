from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq
from live.peers import Manager, Peers, key_pair, pilot_hello, until, welcomed

from stoker.dealer import CurveKeys, Dealer
from stoker.errors import ProtocolError, SessionError
from stoker.manager.executor.client import ClientLink
from stoker.manager.live.admission import PeerRole
from stoker.manager.live.peer_watch import PeerTimeLimits, PeerWatch
from stoker.manager.live.sockets import ManagerSockets
from stoker.protocol import to_manager as say
from stoker.protocol import wire
from stoker.protocol.calls import CallSpec
from stoker.protocol.session import KeyPair, SessionFile, SessionFolder

# ---- strangers


LIMIT_S = 50.0
"""Seconds; a pilot waits a minute for its first message from a manager."""


@pytest.fixture
def stranger(folder: SessionFolder, manager: Manager, tmp_path: Path) -> SessionFolder:
    """Return a copy of the session folder with a wrong pilot key."""
    copy = SessionFolder(tmp_path / "copy")
    shutil.copytree(folder.path, copy.path, ignore=shutil.ignore_patterns("journal*", "manager.*"))
    copy.write_key("pilot", key_pair())
    return copy


def test_pilot_with_a_wrong_key_ends_and_logs_the_reason(stranger: SessionFolder, peers: Peers, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker.pilot.main", "--session", str(stranger.path), "--devices", "cpu:1"]
    began = time.monotonic()
    pilot = subprocess.Popen(
        [*command, "--probe", "off", "--scratch", str(tmp_path / "scratch")], stderr=subprocess.PIPE, text=True
    )
    try:
        assert pilot.wait(LIMIT_S) == 2
    finally:
        pilot.kill()
        pilot.communicate()
    assert time.monotonic() - began < LIMIT_S
    [log] = stranger.path.glob("pilots/*/pilot.log")
    assert "the manager does not accept this pilot's key" in log.read_text()
    assert not list((tmp_path / "scratch" / f"stoker-{os.getuid()}").glob("pilot-*"))
    [client] = welcomed(peers, "client")
    assert client.status().pilots == ()


ANYWHERE = "tcp://127.0.0.1:*"


@pytest.fixture
def listen() -> Iterator[Callable[..., tuple[zmq.Socket[bytes], str]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(key: KeyPair, address: str = ANYWHERE) -> tuple[zmq.Socket[bytes], str]:
        router = context.socket(zmq.ROUTER)
        router.curve_server, router.curve_secretkey = True, key.secret.encode()
        router.linger = 0
        until(lambda: _bound(router, address), what="the port is free again")
        return router, router.getsockopt_string(zmq.LAST_ENDPOINT)

    yield make
    context.destroy(0)


def dealer_to(address: str, *, server: KeyPair) -> Dealer:
    mine = key_pair()
    keys = CurveKeys(server.public, mine.public, mine.secret)
    return Dealer(address, name="p", keys=keys, log=logging.getLogger("test"))


def test_peer_reconnects_after_another_service_held_the_port(listen) -> None:
    ours = key_pair()

    def comes_back() -> bool:
        dealer.reconnect_to(address)  # reconnect, as every peer does while the manager is absent
        return dealer.handle_connection_changes()

    stranger, address = listen(key_pair())
    with closing(dealer_to(address, server=ours)) as dealer:
        until(lambda: comes_back() or dealer.failed_handshakes >= 2, what="the peer is refused and tries again")
        assert not dealer.connected
        stranger.close()
        manager, _ = listen(ours, address)
        until(comes_back, what="its own manager accepts the peer")
        assert dealer.failed_handshakes == 0
        manager.close()


def test_connection_is_lost_when_sending_fails(listen) -> None:
    ours = key_pair()
    _, address = listen(ours)
    with closing(dealer_to(address, server=ours)) as dealer:
        until(dealer.handle_connection_changes, what="a connection")
        connected_at = time.monotonic()
        dealer.socket.disconnect(address)
        dealer.send(b"to nobody")
        assert not dealer.connected
        assert dealer.lost_at >= connected_at


def _bound(router: zmq.Socket[bytes], address: str) -> bool:
    try:
        router.bind(address)
    except zmq.ZMQError:
        return False
    return True


# ---- garbage


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
def test_every_decoder_raises_protocol_error_on_unreadable_bytes(name: str) -> None:
    for reader in (
        wire.from_client_decoder(), wire.from_pilot_decoder(), wire.to_pilot_decoder(), wire.to_client_decoder(),
        wire.to_library_decoder(), wire.to_agent_decoder(),
    ):  # fmt: skip
        if name != "a sequence too large":
            with pytest.raises(ProtocolError):
                reader(GARBAGE[name])
    assert wire.decode_other_version_hello(GARBAGE[name]) is None


def test_manager_survives_garbage_from_known_peers(folder: SessionFolder, manager: Manager, peers: Peers) -> None:
    [kind, *rude] = welcomed(peers, "client", "client", "pilot")
    chance = random.Random(7)
    frames = [*GARBAGE.values()] * 50 + [chance.randbytes(chance.randrange(1, 200)) for _ in range(100)]
    calls = [CallSpec(7, b"x" * 50)]  # type: ignore[arg-type]
    for whole in ([say.ClientHello(wire.VERSION, kind.session)], [say.Submit("f", "bare", calls)]):  # type: ignore[arg-type]
        data = wire.encode(whole, sequence=2)
        frames += [data[:end] for end in range(1, len(data) - 1)]
    for peer in rude:
        for frame in frames:
            peer.socket.send(frame)
    bad = len(rude) * (len(frames) - 50)  # a frame with only a number is valid
    until(
        lambda: kind.status().refused.get("frame that the protocol does not define", 0) >= bad, what="all are refused"
    )
    after = kind.status()
    assert (after.queued, after.running, after.done) == (0, 0, 0)
    assert manager.process.poll() is None
    lines = [line for line in folder.manager_log.read_text().splitlines() if "refused a frame" in line]
    assert 1 <= len(lines) <= 5 * len(rude), "one line in ten seconds about one peer"


NO_NAMES = [b"\xff\xfe-pilot", b"~0123456789abcdef", b"n1\nWARNING pilot n2 is lost", b""]
"""Connection identities that name no peer. ZeroMQ replaces an empty identity with a zero and four arbitrary bytes."""


def test_peer_without_a_readable_name_is_refused(folder: SessionFolder, manager: Manager, peers: Peers) -> None:
    [client] = welcomed(peers, "client")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    there, pair = folder.read(), folder.read_key("pilot")
    opened = []
    for identity in NO_NAMES:
        rude = context.socket(zmq.DEALER)
        opened.append(rude)  # an unknown connection is closed
        rude.curve_serverkey, rude.linger = there.server_key.encode(), 0
        rude.curve_publickey, rude.curve_secretkey = pair.public.encode(), pair.secret.encode()
        if identity:
            rude.routing_id = identity
        rude.connect(there.address)
        rude.send(wire.encode([pilot_hello(there.session)]))

    def refused() -> int:
        return client.status().refused.get("frame that the protocol does not define", 0)

    try:
        until(lambda: refused() == len(NO_NAMES), what="all are refused")
    finally:
        context.destroy(0)
    [late] = welcomed(peers, "pilot")
    late.close()  # this connection breaks last, so the manager would declare its pilot lost later
    until(lambda: f"pilot {late.name} did not reconnect" in folder.manager_log.read_text(), what="the loss of a pilot")
    assert manager.process.poll() is None
    assert [pilot.pilot for pilot in client.status().pilots] == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"public": "x", "secret": "y"}', None])
def test_damaged_session_keys_are_reported_with_advice(folder: SessionFolder, data: bytes | None) -> None:
    server = folder.read_key("server")
    folder.write(SessionFile("test", wire.VERSION, "tcp://127.0.0.1:1", server.public))
    file = folder.key_file("client")
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    with pytest.raises(SessionError) as caught:
        ClientLink(folder)
    assert "client.json" in str(caught.value)
    assert "is damaged: " in str(caught.value) or data is None
    assert "without it no program or command can join the session" in str(caught.value)
    assert str(folder.lease) in str(caught.value)
    assert folder.read_key("server") == server


def test_damaged_session_files_are_reported(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    for data in (b"{", b'{"session": "\xff"}', b"[" * 100_000, msgspec.json.encode({"session": 1})):
        folder.file.write_bytes(data)
        with pytest.raises(Exception, match=r"session\.json is damaged") as caught:
            folder.read()
        assert type(caught.value).__name__ == "SessionError"


# ---- watching peers


TURN_S = 0.1


def given_up(watch: PeerWatch, *, seconds: float, may_have_reconnected: bool) -> set[str]:
    """Return the peers declared lost while the manager reads no messages for `seconds`."""
    lost: set[str] = set()
    for turn in range(1, round(seconds / TURN_S) + 1):
        watch.restart_silence_limits(turn * TURN_S, may_have_reconnected=may_have_reconnected)
        lost |= {name for _, name, _ in watch.lost_peers(turn * TURN_S)}
    return lost


@pytest.fixture
def cut() -> PeerWatch:
    """A program and a pilot whose connections have just broken."""
    watch = PeerWatch(PeerTimeLimits())
    for role, name in ((PeerRole.CLIENT, "program"), (PeerRole.PILOT, "pilot")):
        watch.note_message(role, name, 0.0)
        assert watch.note_disconnection(role, name, 0.0)
    return watch


def test_peers_with_an_unread_hello_are_not_declared_lost(cut: PeerWatch) -> None:
    assert given_up(cut, seconds=60.0, may_have_reconnected=True) == set()
    assert {name for _, name, _ in cut.lost_peers(61.5)} == {"pilot"}, (
        "the manager reads again, and the pilot sends nothing"
    )
    assert {name for _, name, _ in cut.lost_peers(65.5)} == {"program"}


def test_peers_without_a_new_connection_are_declared_lost(cut: PeerWatch) -> None:
    assert given_up(cut, seconds=4.0, may_have_reconnected=False) == {"pilot"}
    assert given_up(cut, seconds=6.0, may_have_reconnected=False) == {"program"}


def test_wait_for_the_first_client_excludes_time_without_reading() -> None:
    watch = PeerWatch(PeerTimeLimits())
    watch.expect_first_client(0.0)
    watch.restart_silence_limits(1.0)
    assert not list(watch.lost_peers(PeerTimeLimits().first_client_s - 1))


@pytest.fixture
def sockets(folder: SessionFolder) -> Iterator[ManagerSockets]:
    sockets = ManagerSockets(folder, any_port=True)
    folder.write(SessionFile("test", wire.VERSION, sockets.address, folder.read_key("server").public))
    yield sockets
    sockets.close()


def test_connection_is_unread_until_its_first_frame(sockets: ManagerSockets, peers: Peers) -> None:
    def waited_for(is_unread: bool) -> bool:
        sockets.wait(20)
        return sockets.has_unread_connection is is_unread

    assert waited_for(False)
    peer = peers("pilot")
    until(lambda: waited_for(True), what="a connection")
    until(lambda: list(sockets.read_frames()) or sockets.wait(20), what="its hello")
    assert not sockets.has_unread_connection
    there = sockets.address
    peer.socket.disconnect(there)
    peer.socket.connect(there)
    until(lambda: waited_for(True), what="its second connection")
    peer.close()
    until(lambda: waited_for(False), what="the connection's end")
