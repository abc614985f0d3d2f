"""The key of a block admits only pilots of that block until the key is revoked."""

from __future__ import annotations

import pytest
import zmq
from live.peers import Manager, Peer, Peers, pilot_hello, until, welcomed

from stoker.manager.factory import pilot_command
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.session import SessionFolder


@pytest.fixture
def of_block(folder: SessionFolder, manager: Manager, peers: Peers) -> Peers:
    del manager

    def make(block: str, name: str, *, says: str | None = None) -> Peer:
        pilot_command.issue_block_key(folder, block)
        return peers("pilot", key=folder.read_block_key(block), name=name, block=block if says is None else says)

    return make


def known(peers: Peers) -> dict[str, str]:
    [client] = welcomed(peers, "client")
    return {pilot.pilot: pilot.block for pilot in client.status().pilots}


def test_each_block_has_its_own_private_key(folder: SessionFolder) -> None:
    for block in ("b1", "b2"):
        pilot_command.issue_block_key(folder, block)
    first = folder.read_block_key("b1")
    pilot_command.issue_block_key(folder, "b1")
    assert folder.read_block_key("b1") == first
    assert first != folder.read_block_key("b2")
    assert folder.block_key_file("b1").stat().st_mode & 0o077 == 0
    assert folder.block_keys.stat().st_mode & 0o077 == 0
    with pytest.raises(Exception, match="is not the name of a block"):
        folder.block_key_file("../client")


def test_key_is_refused_for_a_pilot_of_another_block(of_block: Peers, peers: Peers, folder: SessionFolder) -> None:
    victim = of_block("b1", "n1~0123456789abcdef")
    victim.hear(to_pilot.PilotWelcome)
    for identity in ("n1~fedcba9876543210", "n1"):
        thief = of_block("b2", identity, says="b2")
        assert "pilot n1 belongs to block b1, but its key is for block b2" in thief.hear(to_pilot.PilotRefused).reason
        thief.send(say.PilotLeaving("it is mine now"))
        assert thief.hear(to_pilot.PilotRefused)
        thief.close()
    liar = of_block("b2", "n2~0123456789abcdef", says="b1")
    assert "belongs to block b1, but its key is for block b2" in liar.hear(to_pilot.PilotRefused).reason
    assert victim.silent(1.5), "a thief's answers do not reach the victim, which stays connected when the thief leaves"
    victim.send(say.WalltimeUpdate(3600.0))
    victim.hear(to_pilot.Ack)
    assert known(peers) == {"n1": "b1"}
    assert "with the key of another block" not in folder.manager_log.read_text()


def test_revoked_key_is_refused(of_block: Peers, peers: Peers, folder: SessionFolder) -> None:
    of_block("b1", "n1~0123456789abcdef").hear(to_pilot.PilotWelcome)
    pair = folder.read_block_key("b1")
    pilot_command.revoke_block_key(folder, "b1")
    pilot_command.revoke_block_key(folder, "b1")
    late = peers("pilot", hello=False, key=pair, name="n9~0123456789abcdef")
    watch = late.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    late.send(pilot_hello(late.session, block="b1"), numbered=False)
    assert late.silent(0.5)
    watch.close(0)
    assert known(peers) == {"n1": "b1"}


def test_restarted_manager_refuses_the_key_of_another_block(
    of_block: Peers, peers: Peers, manager: Manager, folder: SessionFolder
) -> None:
    victim = of_block("b1", "n1~0123456789abcdef")
    victim.hear(to_pilot.PilotWelcome)
    manager.kill()
    victim.close()  # an open peer would reconnect and receive messages for the next pilot of this name
    manager.start()
    again = peers("pilot", key=folder.read_block_key("b1"), name="n1~0123456789abcdef", block="b1")
    again.hear(to_pilot.PilotWelcome)
    thief = of_block("b2", "n1~fedcba9876543210", says="b2")
    thief.hear(to_pilot.PilotRefused)
    until(lambda: known(peers) == {"n1": "b1"}, what="the pilot is known again")
