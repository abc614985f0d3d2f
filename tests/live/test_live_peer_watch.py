"""Which peers the manager gives up, and that it gives up none that has come back while it reads no messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from live.peers import Peer, until

from stoker.manager.live.admission import Role
from stoker.manager.live.doors import Doors
from stoker.manager.live.peer_watch import Patience, PeerWatch
from stoker.protocol import wire
from stoker.protocol.session import SessionFile, SessionFolder

TURN_S = 0.1


def given_up(watch: PeerWatch, *, seconds: float, may_be_back: bool) -> set[str]:
    """The peers that are given up while the manager reads nothing for so long."""
    lost: set[str] = set()
    for turn in range(1, round(seconds / TURN_S) + 1):
        watch.excuse_silence(turn * TURN_S, may_be_back=may_be_back)
        lost |= {name for _, name, _ in watch.overdue(turn * TURN_S)}
    return lost


@pytest.fixture
def cut() -> PeerWatch:
    """A program and a pilot whose connections broke just now."""
    watch = PeerWatch(Patience())
    for role, name in ((Role.CLIENT, "program"), (Role.PILOT, "pilot")):
        watch.heard(role, name, 0.0)
        assert watch.cut(role, name, 0.0)
    return watch


def test_peers_whose_hello_waits_unread_are_not_given_up(cut: PeerWatch) -> None:
    assert given_up(cut, seconds=60.0, may_be_back=True) == set()
    assert {name for _, name, _ in cut.overdue(61.5)} == {"pilot"}, "it is read again, and the pilot says nothing"
    assert {name for _, name, _ in cut.overdue(65.5)} == {"program"}


def test_peers_that_made_no_new_connection_are_given_up_though_nothing_is_read(cut: PeerWatch) -> None:
    assert given_up(cut, seconds=4.0, may_be_back=False) == {"pilot"}
    assert given_up(cut, seconds=6.0, may_be_back=False) == {"program"}


def test_the_first_client_has_no_less_time_because_nothing_was_read() -> None:
    watch = PeerWatch(Patience())
    watch.expect_first_client(0.0)
    watch.excuse_silence(1.0)
    assert not list(watch.overdue(Patience().first_client_s - 1))


@pytest.fixture
def doors(folder: SessionFolder) -> Iterator[Doors]:
    doors = Doors(folder, any_port=True)
    folder.write(SessionFile("test", wire.VERSION, doors.address, folder.read_key("server").public))
    yield doors
    doors.close()


def test_a_connection_is_unread_until_its_first_frame_is_read_or_it_breaks(
    doors: Doors, peers: Callable[..., Peer]
) -> None:
    def waited_for(is_unread: bool) -> bool:
        doors.wait(20)
        return doors.has_unread_connection is is_unread

    assert waited_for(False)
    peer = peers("pilot")
    until(lambda: waited_for(True), what="a connection")
    until(lambda: list(doors.frames()) or doors.wait(20), what="its hello")
    assert not doors.has_unread_connection
    there = doors.address
    peer.socket.disconnect(there)
    peer.socket.connect(there)
    until(lambda: waited_for(True), what="its second connection")
    peer.close()
    until(lambda: waited_for(False), what="the end of it")
