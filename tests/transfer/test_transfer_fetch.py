from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fetched import get
from polling import PATIENCE_S
from transfer.hosts import KEY, PART, SHORT, FaultyRelay, Host, Original, Running, until

from stoker.connections import split_address
from stoker.contexts.objects import has_content_of
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import ObjectSource
from stoker.pilot.transfer.seed import Seed

Hosts = Callable[..., Host]
Relays = Callable[..., FaultyRelay]


@pytest.mark.parametrize("known", [True, False])
def test_file_is_transferred(host: Hosts, big: Original, known: bool) -> None:
    one, two = host(big), host()
    outcome = two.get(big, one.source, manifest=known)
    assert outcome.peer_bytes == big.ref.size_bytes
    assert outcome.origin_bytes == 0
    assert one.server.sent_bytes == big.ref.size_bytes
    assert not two.lost


def test_folder_is_transferred_with_all_its_contents(host: Hosts, folder: Original) -> None:
    one, two = host(folder), host()
    two.get(folder, one.source)
    there = two.folder / "object"
    assert os.readlink(there / "deep" / "again") == "../weights"
    assert (there / "deep" / "empty").is_dir()
    assert os.access(there / "run me", os.X_OK)
    assert not os.access(there / "weights", os.X_OK)


@pytest.mark.parametrize("size", [0, PART])
def test_small_object_is_fetched_with_a_single_request(host: Hosts, relay: Relays, tmp_path: Path, size: int) -> None:
    (tmp_path / "small").write_bytes(os.urandom(size))
    small = Original(tmp_path / "small")
    one, two = host(small), host()
    between = relay(one)
    two.get(small, between.source)
    assert between.connections == 1
    # The relay passed only the handshake answer, one header, the manifest and the bytes, so nothing was requested
    # twice.
    assert between.passed - size - len(small.manifest) < 400


def test_object_is_copied_from_the_path_of_its_origin(host: Hosts, big: Original, folder: Original) -> None:
    one, two = host(), host()
    outcome = one.get(big, big.source, manifest=True)
    assert outcome.origin_bytes == big.ref.size_bytes
    assert outcome.peer_bytes == 0
    assert two.get(folder, folder.source, manifest=True).origin_bytes == folder.ref.size_bytes


def test_links_outside_the_folder_are_read_as_their_targets(host: Hosts, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(os.urandom(1000))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "weights").symlink_to("../blob")
    hub = Original(tmp_path / "hub")
    one, two = host(), host(hub)
    one.get(hub, hub.source, manifest=True)
    assert not (one.folder / "object" / "weights").is_symlink()
    one.close()
    host().get(hub, two.source)


def test_two_sources_share_the_work(host: Hosts, relay: Relays, big: Original) -> None:
    one, two, three = host(big), host(big), host()

    def share(chunk: bytes, before: int) -> bytes:
        """Each source stops after three parts until the other source has started to send."""
        if before > 3 * PART:
            until(lambda: one.server.sent_bytes and two.server.sent_bytes)
        return chunk

    relays = [relay(each, spoil=share) for each in (one, two)]
    outcome = three.get(big, *(ObjectSource(address=each.source.address) for each in relays))
    assert one.server.sent_bytes > 0
    assert two.server.sent_bytes > 0
    assert big.ref.size_bytes <= outcome.peer_bytes < 1.3 * big.ref.size_bytes  # up to 30 % may arrive twice


def test_fetching_pilot_serves_its_received_parts(host: Hosts, relay: Relays, big: Original) -> None:
    """In a chain of three hosts, host 3 fetches from host 2 while host 2 fetches from host 1."""
    one, two, three = host(big), host(), host()
    gate = threading.Event()
    between = relay(one, spoil=lambda chunk, before: _hold_after(chunk, before, gate, 5 * PART))
    two.expected.add(big.name)
    second = Running(two.fetch(big, between.source))
    third = Running(three.fetch(big, two.source))
    until(lambda: three.copies.get(big.name) and len(three.copies[big.name].arrivals) >= 2)
    assert not second.outcome
    gate.set()
    second.wait()
    assert third.wait().peer_bytes == big.ref.size_bytes
    assert has_content_of(three.folder / "object", big.ref)
    assert one.server.sent_bytes == big.ref.size_bytes


def test_wrong_part_is_dropped_and_its_source_named(host: Hosts, big: Original, tmp_path: Path) -> None:
    liar, honest, taker = host(big), host(big), host()
    (tmp_path / "lie").write_bytes(big.path.read_bytes())
    liar.copies[big.name]._root = os.open(tmp_path / "lie", os.O_RDWR)
    with (tmp_path / "lie").open("r+b") as file:
        for place in range(0, big.ref.size_bytes, PART):
            file.seek(place)
            file.write(b"wrong")
    taker.get(big, liar.source, honest.source, manifest=True)
    assert [source for source, _ in taker.lost] == [liar.source]
    assert "does not match its name" in taker.lost[0][1]


def test_wrong_manifest_is_refused(host: Hosts, big: Original, folder: Original) -> None:
    liar, taker = host(folder), host()
    liar.copies[big.name] = liar.copies[folder.name]
    with pytest.raises(wire.PeerError):
        taker.get(big, liar.source)
    assert "not the manifest" in taker.lost[0][1]
    assert not (taker.folder / "object").exists()


def test_changed_source_is_reported(host: Hosts, folder: Original) -> None:
    (folder.path / "weights").write_bytes(os.urandom(PART + 7))
    taker = host()
    with pytest.raises(wire.PeerError):
        taker.get(folder, folder.source, manifest=True)
    assert "has changed since the recipe was made" in taker.lost[0][1]


def test_fetch_continues_after_broken_connections(host: Hosts, relay: Relays, big: Original) -> None:
    one, two = host(big), host()
    between = relay(one, spoil=lambda chunk, before: chunk if before < 3.5 * PART else None)
    outcome = two.get(big, between.source)
    assert between.connections >= 4
    assert outcome.peer_bytes == big.ref.size_bytes
    assert not two.lost


def test_retry_keeps_the_verified_parts(host: Hosts, relay: Relays, big: Original) -> None:
    one, two = host(big), host()
    gate = threading.Event()
    between = relay(one, spoil=lambda chunk, before: _hold_after(chunk, before, gate, 6 * PART))
    fetch = two.fetch(big, between.source)
    running = Running(fetch)
    until(lambda: big.name in two.copies and len(two.copies[big.name].arrivals) >= 4)
    fetch.stop()
    with pytest.raises(wire.PeerError, match="stopped"):
        running.wait()
    gate.set()
    here = len(two.copies[big.name].arrivals) * PART
    with (two.folder / "object").open("r+b") as file:  # damage a part written by the first fetch
        file.seek(two.copies[big.name].arrivals[0] * PART)
        file.write(b"rotten")
    outcome = two.get(big, one.source)
    assert outcome.peer_bytes <= big.ref.size_bytes - here + 2 * PART


@pytest.mark.parametrize(("how", "why"), [("hangs", "sent no bytes|in time"), ("trickles", "too slow")])
def test_stalled_source_is_named_and_another_source_continues(
    host: Hosts, relay: Relays, big: Original, how: str, why: str
) -> None:
    one, two, three = host(big), host(big), host(limits=SHORT)

    def stall(chunk: bytes, before: int) -> bytes:
        if how == "hangs" and before > 2 * PART:
            between.frozen.set()
        if how == "trickles" and before > 10_000:
            time.sleep(0.5)
        return chunk

    between = relay(one, spoil=stall)
    fetch = three.fetch(big, between.source)
    running = Running(fetch)
    until(lambda: three.lost)
    assert running.outcome is None
    assert re.search(why, three.lost[0][1])
    fetch.set_sources([two.source])
    assert running.wait().peer_bytes >= big.ref.size_bytes


def test_server_reads_no_data_of_a_client_without_the_key(host: Hosts, big: Original) -> None:
    one = host(big)
    for said in (b"", b"GET / HTTP/1.0\r\n\r\n" * 20, wire.MAGIC + bytes(32) + bytes(32) + b"\xff" * 100, bytes(10**6)):
        with socket.create_connection(split_address(one.server.address)) as sock:
            sock.settimeout(10)
            try:
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                heard = b"".join(iter(lambda: sock.recv(4096), b""))
            except OSError:
                heard = b""
        assert len(heard) <= len(wire.MAGIC) + 64
    assert host().get(big, one.source).peer_bytes == big.ref.size_bytes  # the server still serves other hosts


def test_oversized_or_altered_message_closes_the_connection(host: Hosts, big: Original) -> None:
    one = host(big)
    channel = wire.connect_to_peer(one.server.address, key=KEY, limits=SHORT)
    channel.send_body(b"\x7f\xff\xff\xff" + bytes(16))
    with pytest.raises(wire.PeerError):
        channel.receive()
    channel.close()
    channel = wire.connect_to_peer(one.server.address, key=KEY, limits=SHORT)
    heard: list[bytes] = []
    real = channel.send_body
    channel.send_body = heard.append  # type: ignore[method-assign,assignment]
    channel.send({"op": "open", "object": big.name})
    channel.send_body = real  # type: ignore[method-assign]
    channel.send_body(heard[0].replace(b"open", b"opex"))
    with pytest.raises(wire.PeerError, match=r"closed the connection|broke"):
        channel.receive()
    channel.close()


def test_invalid_requests_are_answered_or_disconnected(host: Hosts, big: Original) -> None:
    one = host(big)
    for request in (
        {"op": "open", "object": "../../etc/passwd"},
        {"op": "open"},
        {"op": "piece", "index": 0},
        {"op": "put", "name": "x", "size": 1, "sha256": ""},
        {"op": "wait"},
        {},
    ):
        channel = wire.connect_to_peer(one.server.address, key=KEY, limits=SHORT)
        channel.send(request)
        assert channel.receive()["error"] in ("absent", "unknown")
        channel.close()
    channel = wire.connect_to_peer(one.server.address, key=KEY, limits=SHORT)
    channel.send({"op": "open", "object": big.name})
    channel.receive()
    for index in (-1, 10**9, "0", None, 0.5):
        channel.send({"op": "piece", "index": index})
        assert channel.receive()["error"] == "unknown"
        channel.send({"op": "open", "object": big.name})
        channel.receive()
    channel.close()


def test_busy_source_is_awaited(host: Hosts, big: Original) -> None:
    one, two = host(big, most=1), host()
    channel = wire.connect_to_peer(one.server.address, key=KEY, limits=SHORT)
    channel.send({"op": "open", "object": big.name, "manifest": False})
    channel.receive()
    running = Running(two.fetch(big, one.source))
    until(lambda: one.server.served_peers == 1 and threading.active_count() > 3)
    channel.close()
    assert running.wait().peer_bytes == big.ref.size_bytes


def test_unreachable_sources_are_named(host: Hosts, big: Original) -> None:
    taker = host()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = ObjectSource(address=f"127.0.0.1:{port}", label="n014")
    with pytest.raises(wire.PeerError, match="no source"):
        taker.get(big, gone, ObjectSource(address="nonsense", label="n021"))
    assert {str(source) for source, _ in taker.lost} == {"n014", "n021"}
    assert all("cannot be reached" in why for _, why in taker.lost)


def test_full_disk_ends_the_fetch(host: Hosts, big: Original, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=20m tmpfs '{small}' 2>/dev/null"):
        pytest.skip("no disk can be mounted here")
    try:
        one, two = host(big), host()
        two.folder = small
        with pytest.raises(OSError, match="No space left"):
            two.get(big, one.source)
        two.copies.clear()
        two.fetches.clear()
    finally:
        os.system(f"umount -l '{small}'")


def _hold_after(chunk: bytes, before: int, gate: threading.Event, limit: int) -> bytes:
    """Forward `limit` bytes. Forward all later bytes when the gate opens."""
    if before > limit and not gate.wait(PATIENCE_S):
        raise AssertionError("the gate was never opened")
    return chunk


HONEST = 40


@pytest.mark.parametrize(("kind", "stranger"), [("pilot", "127.0.0.1"), ("seed", "127.0.0.2")])
def test_fetch_succeeds_despite_many_silent_connections(
    kind: str, stranger: str, host: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "small").write_bytes(b"seven and a half kilobytes" * 300)
    small = Original(tmp_path / "small")
    (tmp_path / "objects" / f"{small.name}~1").write_bytes(small.path.read_bytes())
    one = host(small)
    server = one.server if kind == "pilot" else Seed(tmp_path / "objects").serve(key=KEY, host="127.0.0.1")
    where = split_address(server.address)
    silent: list[socket.socket] = []
    caplog.set_level(logging.WARNING, logger="stoker.transfer")
    try:
        began = time.monotonic()
        for number in range(HONEST):
            while len(silent) < 40 + number // 10:  # more silent connections open continuously
                silent.append(socket.create_connection(where, source_address=(stranger, 0)))
            get(small.name, tmp_path / f"copy-{number}", addresses=[server.address], key=KEY)
        assert time.monotonic() - began < wire.LIMITS.handshake_s * 4, "a fetch waited for strangers to give up"
        assert (tmp_path / f"copy-{HONEST - 1}").read_bytes() == small.path.read_bytes()
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 4
    finally:
        for sock in silent:
            sock.close()
        server.close()
