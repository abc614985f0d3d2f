"""A real manager process, with peers that speak the real protocol over real sockets."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from live.peers import Manager, Peer, key_pair, pilot_hello, until
from polling import PATIENCE_S

from stoker.contexts.recipe import BARE
from stoker.manager.live import lease
from stoker.manager.live.replay import status_of_ended_session, story_of_ended_session
from stoker.manager.main import TAKEN_OVER
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.session import SessionFolder

Peers = Callable[..., Peer]


def submit(client: Peer, *calls: int) -> bytes:
    specs = [CallSpec(call, b"arguments") for call in calls]  # type: ignore[arg-type]
    return client.send(say.Submit("f", "bare", specs))  # type: ignore[arg-type]


def define(client: Peer) -> None:
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code"))  # type: ignore[arg-type]


def serve(pilot: Peer, library: int = 1) -> None:
    pilot.hear(to_pilot.StartLibrary)
    pilot.send(say.LibraryReady(library, 0.1, 0.2))  # type: ignore[arg-type]


def end(pilot: Peer, *calls: int, library: int = 1) -> None:
    ends = [CallEnd(call, True, b"result", 0.001) for call in calls]  # type: ignore[arg-type]
    pilot.send(say.CallsEnded(library, ends))  # type: ignore[arg-type]


def status(client: Peer) -> to_client.Status:
    client.send(say.AskStatus(), numbered=False)
    return client.hear(to_client.Status)


@pytest.fixture
def client(manager: Manager, peers: Peers) -> Peer:
    client = peers("client")
    client.hear(to_client.ClientWelcome)
    define(client)
    return client


@pytest.fixture
def pilot(manager: Manager, peers: Peers) -> Peer:
    pilot = peers("pilot")
    pilot.hear(to_pilot.PilotWelcome)
    return pilot


def test_a_call_goes_all_the_way_and_the_journal_tells_its_story(
    client: Peer, pilot: Peer, manager: Manager, folder: SessionFolder
) -> None:
    submit(client, 0)
    serve(pilot)
    run = pilot.hear(to_pilot.RunCalls)
    assert [spec.call for spec in run.calls] == [0]
    assert run.function_blob.blob == b"code"
    end(pilot, 0)
    assert [end.call for end in client.hear(to_client.Results).ends] == [0]
    client.send(say.EndSession("test is over"))
    pilot.hear(to_pilot.Exit)
    assert manager.ended() == 0
    assert status_of_ended_session(folder).done == 1
    story = story_of_ended_session(folder, "c-0")
    assert story.found
    assert any("ended with a result" in line.text for line in story.lines)


def test_a_peer_without_the_key_is_kept_out(client: Peer, peers: Peers) -> None:
    stranger = peers("client", key=key_pair())
    assert stranger.silent(0.5)
    assert status(client).done == 0


def test_a_neighbour_of_another_session_is_refused(manager: Manager, peers: Peers) -> None:
    neighbour = peers("client", hello=False)
    neighbour.send(say.ClientHello(wire.VERSION, "other"), numbered=False)
    assert "other" in neighbour.hear(to_client.ClientRefused).reason
    pilot = peers("pilot", hello=False)
    pilot.send(pilot_hello("other"), numbered=False)
    assert "this is session test" in pilot.hear(to_pilot.PilotRefused).reason


@pytest.mark.parametrize(("role", "refused"), [("pilot", to_pilot.PilotRefused), ("client", to_client.ClientRefused)])
def test_a_hello_of_a_future_version_is_refused_with_both_versions(
    manager: Manager, client: Peer, peers: Peers, role: str, refused: type
) -> None:
    future = wire.VERSION + 3
    strange = {"host": 7, "received": "all", "new": {}}
    hello = {"type": f"{role}-hello", "protocol": future, "session": "test", **strange}
    peer = peers(role, hello=False)
    peer.socket.send(msgspec.msgpack.encode([0, [hello], "more of the frame"]))
    reason = peer.hear(refused).reason
    assert reason == (
        f"this is session test, protocol {wire.VERSION}; you asked for session test, protocol {future}; "
        "both sides need the same version of Stoker"
    )
    assert status(client).refused == {f"{role} of another version": 1}


@pytest.mark.parametrize("message", [{"type": "submit", "protocol": "two"}, {"type": "pilot-hello"}, "hello", 7])
def test_what_is_no_hello_of_any_version_gets_no_answer(client: Peer, peers: Peers, message: object) -> None:
    peer = peers("pilot", hello=False)
    peer.socket.send(msgspec.msgpack.encode([0, [message]]))
    until(lambda: status(client).refused.get("frame that is not in the protocol") == 1)
    assert peer.silent()


def test_hellos_and_refusals_look_as_every_version_expects(folder: SessionFolder) -> None:
    hellos = [pilot_hello("test"), say.ClientHello(wire.VERSION, "test")]
    for hello in hellos:
        sequence, [plain] = msgspec.msgpack.decode(wire.encode([hello]))
        assert (sequence, plain["protocol"], plain["session"]) == (0, wire.VERSION, "test")
    for refused in (to_pilot.PilotRefused("no"), to_client.ClientRefused("no")):
        assert msgspec.msgpack.decode(wire.encode([refused])) == [0, [{"type": "refused", "reason": "no"}]]


def test_a_pilots_key_cannot_submit(client: Peer, pilot: Peer) -> None:
    pilot.send(say.Submit("f", "bare", [CallSpec(7, b"")]))  # type: ignore[arg-type]
    until(lambda: status(client).refused.get("frame that is not in the protocol") == 1)
    assert status(client).queued == 0


def test_random_and_truncated_frames_change_nothing(client: Peer, pilot: Peer) -> None:
    chance = random.Random(7)
    whole = wire.encode([say.Submit("f", "bare", [CallSpec(7, b"x" * 50)])], sequence=2)  # type: ignore[arg-type]
    before = status(client)
    bad = [chance.randbytes(chance.randrange(1, 200)) for _ in range(100)]
    bad += [whole[:cut] for cut in range(1, len(whole) - 1, 7)]
    for frame in bad:
        client.socket.send(frame)
        pilot.socket.send(frame)
    until(lambda: status(client).refused.get("frame that is not in the protocol", 0) >= 2 * len(bad))
    after = status(client)
    assert (after.queued, after.running, after.done) == (before.queued, before.running, before.done)
    submit(client, 0)
    serve(pilot)
    assert pilot.hear(to_pilot.RunCalls).calls[0].call == 0


def test_a_repeated_and_a_late_message_are_ignored(client: Peer, pilot: Peer) -> None:
    frame = submit(client, 0)
    client.socket.send(frame)
    serve(pilot)
    pilot.hear(to_pilot.RunCalls)
    end(pilot, 0)
    client.hear(to_client.Results)
    end(pilot, 0)
    now = until(lambda: (s := status(client)).refused.get("late or repeated end of a call") and s)
    assert now.done == 1
    assert now.refused["repeated or early frame of a client"] == 1
    assert not [m for m in client.heard if isinstance(m, to_client.Results)]


def test_a_killed_manager_comes_back_and_nothing_runs_twice(
    client: Peer, pilot: Peer, manager: Manager, folder: SessionFolder
) -> None:
    submit(client, 0, 1, 2)
    serve(pilot)
    pilot.hear(to_pilot.RunCalls)
    end(pilot, 0)
    assert client.hear(to_client.Results).first == 0
    pilot.hear(to_pilot.RunCalls, where=lambda m: m.calls[0].call == 1)
    manager.kill()
    manager.start()
    held = say.LibraryFacts(1, "bare", ("cpu:0",), True, (1,))  # type: ignore[arg-type]
    pilot.send(pilot_hello("test", libraries=(held,)), numbered=False)
    assert pilot.hear(to_pilot.PilotWelcome).heartbeat_s == manager.heartbeat_s  # what the session was started with
    client.send(say.ClientHello(wire.VERSION, "test", received=0), numbered=False)
    client.hear(to_client.ClientWelcome)
    again = client.hear(to_client.Results)
    assert (again.first, [end.call for end in again.ends]) == (0, [0])
    end(pilot, 1)
    later = client.hear(to_client.Results)
    assert (later.first, [end.call for end in later.ends]) == (1, [1])
    assert [spec.call for spec in pilot.hear(to_pilot.RunCalls).calls] == [2]


def test_calls_that_never_reached_the_pilot_are_sent_again(client: Peer, pilot: Peer, manager: Manager) -> None:
    submit(client, 0)
    serve(pilot)
    pilot.hear(to_pilot.RunCalls)
    manager.kill()
    manager.start()
    held = say.LibraryFacts(1, "bare", ("cpu:0",), True)  # type: ignore[arg-type]
    pilot.send(pilot_hello("test", libraries=(held,)), numbered=False)
    assert [spec.call for spec in pilot.hear(to_pilot.RunCalls).calls] == [0]


def test_a_pilot_that_vanishes_costs_only_its_calls(client: Peer, pilot: Peer, peers: Peers) -> None:
    submit(client, 0)
    serve(pilot)
    pilot.hear(to_pilot.RunCalls)
    pilot.socket.close(0)
    other = peers("pilot")
    other.hear(to_pilot.PilotWelcome)
    serve(other, library=2)
    assert other.hear(to_pilot.RunCalls).calls[0].call == 0
    now = status(client)
    assert (now.lost_pilots, now.rerun_calls) == (1, 1)
    end(other, 0, library=2)
    assert client.hear(to_client.Results).ends[0].ok


def test_the_session_ends_with_its_client(client: Peer, pilot: Peer, manager: Manager) -> None:
    submit(client, 0)
    client.socket.close(0)
    assert "client" in pilot.hear(to_pilot.Exit).reason
    assert manager.ended() == 0


def test_an_observer_sees_and_does_not_keep_a_session(client: Peer, peers: Peers, manager: Manager) -> None:
    watcher = peers("client", hello=False)
    watcher.send(say.ClientHello(wire.VERSION, "test", observer=True), say.AskStatus(), numbered=False)
    assert watcher.hear(to_client.Status).session == "test"
    watcher.send(say.AskStory("nobody"), numbered=False)
    assert not watcher.hear(to_client.Story).found
    watcher.send(say.Submit("f", "bare", [CallSpec(9, b"")]))  # type: ignore[arg-type]
    assert "observer" in watcher.hear(to_client.Results).ends[0].failure.message
    client.socket.close(0)
    assert manager.ended() == 0


def test_a_queued_call_says_what_it_waits_for(client: Peer) -> None:
    submit(client, 0)
    client.send(say.WantPilots({"0": "pending: Priority"}))
    client.send(say.AskStory("c-0"), numbered=False)
    story: Any = client.hear(to_client.Story)
    assert "waiting" in story.headline
    assert "no pilot has joined yet (block b0: pending: Priority)" in story.lines[-1].text


def test_a_second_manager_on_the_same_folder_is_refused(manager: Manager, folder: SessionFolder) -> None:
    import subprocess
    import sys

    second = subprocess.run(
        [sys.executable, "-m", "stoker.manager.main", "--session", str(folder.path), "--name", "test"],
        capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ,
    )  # fmt: skip
    assert second.returncode == TAKEN_OVER
    assert "already" in second.stderr


def test_a_frozen_manager_that_was_followed_meanwhile_says_nothing_more(
    client: Peer, pilot: Peer, manager: Manager
) -> None:
    """Another login node takes the session over while this one is suspended for longer than its lease lasts."""
    submit(client, 0)
    pilot.hear(to_pilot.StartLibrary)
    assert manager.process is not None
    manager.process.send_signal(signal.SIGSTOP)
    pilot.send(say.LibraryReady(1, 0.1, 0.2))  # type: ignore[arg-type]
    client.send(say.AskStatus(), numbered=False)
    path = lease.lease_file(manager.folder)
    other = msgspec.json.encode(lease.LeaseHolder("login2", "another machine", 7, 70, "theirs"))
    time.sleep(lease.SURE_S + 1.0)
    path.write_bytes(other)
    client.heard.clear()
    pilot.heard.clear()
    manager.process.send_signal(signal.SIGCONT)
    assert manager.ended() == TAKEN_OVER
    assert client.silent()
    assert pilot.silent()
    assert path.read_bytes() == other
    assert "its manager is pid 7 on login2" in manager.folder.manager_log.read_text()


def test_a_frozen_manager_that_nobody_followed_goes_on(client: Peer, manager: Manager) -> None:
    assert manager.process is not None
    manager.process.send_signal(signal.SIGSTOP)
    time.sleep(lease.SURE_S + 1.0)
    manager.process.send_signal(signal.SIGCONT)
    assert status(client).session == "test"
