from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from live.peers import Manager, Peer, Peers, key_pair, pilot_hello, until, welcomed

from stoker.manager.live import lease
from stoker.manager.live.clock import PendingAcks
from stoker.manager.live.server import remove_result_file
from stoker.manager.main import TAKEN_OVER
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_pilot import Ack

# ---- manager


@pytest.fixture
def client(manager: Manager, peers: Peers) -> Peer:
    [client] = welcomed(peers, "client")
    client.define()
    return client


@pytest.fixture
def pilot(manager: Manager, peers: Peers) -> Peer:
    [pilot] = welcomed(peers, "pilot")
    return pilot


def test_peers_with_wrong_keys_or_other_sessions_are_refused(client: Peer, peers: Peers) -> None:
    stranger = peers("client", key=key_pair())
    assert stranger.silent(0.5)
    assert client.status().done == 0
    assert "other" in peers("client", session="other").hear(to_client.ClientRefused).reason
    assert "this is session test" in peers("pilot", session="other").hear(to_pilot.PilotRefused).reason


def test_hello_of_a_future_version_names_both_versions(client: Peer, peers: Peers) -> None:
    future = wire.VERSION + 3
    strange = {"host": 7, "received": "all", "new": {}}
    for role, refused in (("pilot", to_pilot.PilotRefused), ("client", to_client.ClientRefused)):
        hello = {"type": f"{role}-hello", "protocol": future, "session": "test", **strange}
        peer = peers(role, hello=False)
        peer.socket.send(msgspec.msgpack.encode([0, [hello], "more of the frame"]))
        assert peer.hear(refused).reason == (
            f"this is session test, protocol {wire.VERSION}; you asked for session test, protocol {future}; "
            "both sides need the same version of Stoker"
        )
    assert client.status().refused == {"pilot of another version": 1, "client of another version": 1}


def test_bytes_that_are_no_hello_get_no_answer(client: Peer, pilot: Peer, peers: Peers) -> None:
    def refused() -> int:
        return client.status().refused.get("frame that the protocol does not define", 0)

    peer = peers("pilot", hello=False)
    for count, message in enumerate(({"type": "submit", "protocol": "two"}, {"type": "pilot-hello"}, "hello", 7), 1):
        peer.socket.send(msgspec.msgpack.encode([0, [message]]))
        until(lambda: refused() == count)  # noqa: B023
    assert peer.silent()
    pilot.submit(7, payload=b"")  # the key of a pilot cannot submit calls
    until(lambda: refused() == count + 1)
    assert client.status().queued == 0


def test_hellos_and_refusals_keep_one_format_in_every_version(folder: SessionFolder) -> None:
    hellos = [pilot_hello("test"), say.ClientHello(wire.VERSION, "test")]
    for hello in hellos:
        sequence, [plain] = msgspec.msgpack.decode(wire.encode([hello]))
        assert (sequence, plain["protocol"], plain["session"]) == (0, wire.VERSION, "test")
    for refused in (to_pilot.PilotRefused("no"), to_client.ClientRefused("no")):
        assert msgspec.msgpack.decode(wire.encode([refused])) == [0, [{"type": "refused", "reason": "no"}]]


def test_repeated_and_late_messages_are_ignored(client: Peer, pilot: Peer) -> None:
    frame = client.submit(0)
    client.socket.send(frame)
    pilot.serve()
    pilot.hear(to_pilot.RunCalls)
    pilot.end(0)
    client.hear(to_client.Results)
    pilot.end(0)
    now = until(lambda: (s := client.status()).refused.get("late or repeated end of a call") and s)
    assert now.done == 1
    assert now.refused["repeated or early frame of a client"] == 1
    assert not [m for m in client.heard if isinstance(m, to_client.Results)]


def test_observer_sees_a_session_but_does_not_keep_it_alive(client: Peer, peers: Peers, manager: Manager) -> None:
    watcher = peers("client", observer=True)
    assert watcher.status().session == "test"
    watcher.send(say.AskStory("nobody"), numbered=False)
    assert not watcher.hear(to_client.Story).found
    watcher.submit(9, payload=b"")
    assert "observer" in watcher.hear(to_client.Results).ends[0].failure.message
    client.socket.close(0)
    assert manager.ended() == 0


SURE_S = 4.0  # this is longer than the time between two renewals


@pytest.fixture
def brief(folder: SessionFolder) -> Iterator[Manager]:
    """A manager that trusts its lease for only `SURE_S` seconds after a renewal."""
    with closing(
        Manager(folder, patch=f"from stoker.manager.live import lease\nlease.CONFIRMED_FOR_S = {SURE_S}")
    ) as manager:
        yield manager


def test_frozen_manager_continues_unless_it_was_replaced(brief: Manager, peers: Peers) -> None:
    client, pilot = welcomed(peers, "client", "pilot")
    client.define()
    client.submit(0)
    pilot.hear(to_pilot.StartLibrary)
    brief.process.send_signal(signal.SIGSTOP)
    time.sleep(SURE_S + 1.0)
    brief.process.send_signal(signal.SIGCONT)
    assert client.status().session == "test"

    brief.process.send_signal(signal.SIGSTOP)
    pilot.send(say.LibraryReady(1, 0.1, 0.2))  # type: ignore[arg-type]
    client.send(say.AskStatus(), numbered=False)
    path = brief.folder.lease
    other = msgspec.json.encode(lease.LeaseHolder("login2", "another machine", 7, 70, "theirs"))
    time.sleep(SURE_S + 1.0)
    path.write_bytes(other)
    client.heard.clear()
    pilot.heard.clear()
    brief.process.send_signal(signal.SIGCONT)
    assert brief.ended() == TAKEN_OVER
    assert client.silent(), "a replaced manager sends nothing"
    assert pilot.silent()
    assert path.read_bytes() == other
    assert "its manager is pid 7 on login2" in brief.folder.manager_log.read_text()


# ---- pieces


RUN = 5


def yielded(pilot: Peer, first: int, *items: bytes) -> None:
    pilot.send(say.CallYielded(1, 0, RUN, first, list(items)), numbered=False)  # type: ignore[arg-type]


def joined(peers: Peers) -> tuple[Peer, Peer]:
    client, pilot = welcomed(peers, "client", "pilot")
    client.define()
    specs = [CallSpec(0, b"arguments")]  # type: ignore[arg-type]
    client.send(say.Submit("f", "bare", specs, CallOptions(stream=True)))  # type: ignore[arg-type]
    pilot.serve()
    assert pilot.hear(to_pilot.RunCalls).options.stream
    return client, pilot


def written(folder: SessionFolder) -> int:
    return sum(file.stat().st_size for file in folder.path.rglob("journal*") if file.is_file())


def test_pieces_bypass_the_journal(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    client, pilot = joined(peers)
    client.status()
    before = written(folder)
    for number in range(50):
        yielded(pilot, number, b"x" * 1000)
    heard = [client.hear(to_client.Pieces) for _ in range(50)]
    assert [piece.first for piece in heard] == list(range(50))
    client.send(say.PiecesTaken(0, RUN, 50), numbered=False)  # type: ignore[arg-type]
    assert pilot.hear(to_pilot.AckPieces).upto == 50
    assert written(folder) - before < 1000
    assert before > 0
    pilot.send(say.CallsEnded(1, [CallEnd(0, True, pieces=50)]))  # type: ignore[arg-type, list-item]
    assert client.hear(to_client.Results).ends[0].pieces == 50


# ---- acknowledgements


def test_last_acknowledgement_is_sent_with_the_next_frame() -> None:
    acks = PendingAcks(4.0)
    acks.add("p1", Ack(1), 0.0)
    acks.add("p1", Ack(2), 0.1)
    assert acks.take_ack_for_frame("p2") == ()
    assert acks.take_ack_for_frame("p1") == (Ack(2),)
    assert acks.take_ack_for_frame("p1") == ()


def test_acknowledgement_without_a_frame_is_sent_alone() -> None:
    acks = PendingAcks(4.0)
    assert acks.due_at == math.inf
    acks.add("p1", Ack(1), 0.0)
    acks.add("p2", Ack(7), 1.9)
    assert acks.take_overdue_acks(1.99) == []
    assert acks.due_at == 2.0
    assert acks.take_overdue_acks(2.0) == []  # from now on, earlier acknowledgements count as old
    acks.add("p1", Ack(3), 3.0)  # a newer acknowledgement for p1 replaces the old one and keeps its due time
    acks.add("p3", Ack(1), 3.0)
    assert acks.take_overdue_acks(4.0) == [("p1", Ack(3)), ("p2", Ack(7))]
    assert acks.take_overdue_acks(6.0) == [("p3", Ack(1))]
    assert acks.due_at == math.inf


# ---- discarding


def test_discarding_a_result_removes_only_its_own_file(folder: SessionFolder) -> None:
    result, other = folder.objects / "result-1", folder.objects / "weights"
    for file in (result, other, folder.path / "result-2"):
        file.touch()
        remove_result_file(folder, str(file))
    assert not result.exists()
    assert other.exists()
    assert (folder.path / "result-2").exists()
    remove_result_file(folder, str(result))


@pytest.mark.parametrize("name", ["result-\0", "result-" + "x" * 300, "result-folder"])
def test_file_that_cannot_be_removed_does_not_end_the_manager(folder: SessionFolder, name: str) -> None:
    (folder.objects / "result-folder").mkdir()
    remove_result_file(folder, str(folder.objects / name))
