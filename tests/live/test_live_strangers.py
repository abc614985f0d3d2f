"""A real pilot process without the session's key: it ends by itself, soon, and says why; the session goes on."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from live.peers import Manager, Peer, key_pair, until

from stoker.dealer import Dealer, Keys
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.session import KeyPair, SessionFolder

LIMIT_S = 50.0
"""Well below the minute for which a pilot waits for a manager that it has never heard."""


@pytest.fixture
def stranger(folder: SessionFolder, manager: Manager, tmp_path: Path) -> SessionFolder:
    """The session's folder as a neighbour might have it: everything but the keys."""
    copy = SessionFolder(tmp_path / "copy")
    shutil.copytree(folder.path, copy.path, ignore=shutil.ignore_patterns("journal*", "manager.*"))
    copy.write_key("pilot", key_pair())
    return copy


def test_a_pilot_without_the_key_ends_and_says_why(
    stranger: SessionFolder, peers: Callable[..., Peer], tmp_path: Path
) -> None:
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
    client = peers("client")
    client.hear(to_client.ClientWelcome)
    client.send(say.AskStatus(), numbered=False)
    assert client.hear(to_client.Status).pilots == ()


def test_a_connection_outlives_that_somebody_else_listened_where_its_manager_was() -> None:
    ours, mine = key_pair(), key_pair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def listen(key: KeyPair, address: str) -> tuple[zmq.Socket[bytes], str]:
        router = context.socket(zmq.ROUTER)
        router.curve_server, router.curve_secretkey = True, key.secret.encode()
        router.linger = 0
        until(lambda: _bound(router, address), what="the port is free again")
        return router, router.getsockopt_string(zmq.LAST_ENDPOINT)

    def comes_back() -> bool:
        dealer.move_to(address)  # as everybody does now and then while the manager is away
        return dealer.came_back()

    stranger, address = listen(key_pair(), "tcp://127.0.0.1:*")
    dealer = Dealer(address, name="p", keys=Keys(ours.public, mine.public, mine.secret), log=logging.getLogger("test"))
    try:
        until(lambda: comes_back() or dealer.failed_handshakes >= 2, what="it is not taken, and tries again")
        assert not dealer.connected
        stranger.close()
        manager, _ = listen(ours, address)
        until(comes_back, what="its own manager takes it")
        assert dealer.failed_handshakes == 0
        manager.close()
    finally:
        dealer.close()
        context.destroy(0)


def test_who_finds_the_connection_gone_when_sending_has_lost_it_then_and_not_when_it_began() -> None:
    ours, mine = key_pair(), key_pair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_secretkey = True, ours.secret.encode()
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    dealer = Dealer(address, name="p", keys=Keys(ours.public, mine.public, mine.secret), log=logging.getLogger("test"))
    try:
        until(dealer.came_back, what="a connection")
        connected_at = time.monotonic()
        dealer.socket.disconnect(address)
        dealer.send(b"to nobody")
        assert not dealer.connected
        assert dealer.lost_at >= connected_at
    finally:
        dealer.close()
        context.destroy(0)


def _bound(router: zmq.Socket[bytes], address: str) -> bool:
    try:
        router.bind(address)
    except zmq.ZMQError:
        return False
    return True
