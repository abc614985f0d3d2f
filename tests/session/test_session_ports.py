"""A manager counts as running only if it belongs to the session, because another program may use its port."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from faults.world import World, command_of, kill, until
from live.peers import Manager, session_folder
from session.held import hold_lease, output_of
from session.test_session_up import stoker

from stoker.errors import SessionError
from stoker.manager.cli.ask import NoAnswerError, Observer, SessionEndedError
from stoker.manager.executor import detached
from stoker.manager.executor.client import ClientLink
from stoker.manager.live import interfaces, lease, presence
from stoker.protocol import wire
from stoker.protocol.session import SessionFile, SessionFolder, find_session

SITE = """
name = "one"
[pilot]
devices = "cpu:1"
init_blocks = {pilots}
[session]
heartbeat = "20 s"
ports = "{first}-{last}"
"""
PROGRAM = """
import sys, stoker

@stoker.app
def plus_one(number):
    return number + 1

with stoker.load(session=sys.argv[1]):
    print(plus_one(1).result(60))
"""


def free_ports(count: int = 1) -> int:
    while True:
        first = random.randint(22_000, 32_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def up(world: World, first: int, last: int = 0, *, pilots: int = 1) -> SessionFolder:
    (world.path / "one.toml").write_text(SITE.format(first=first, last=last or first, pilots=pilots))
    said = stoker(world, "up", "one.toml", "--json")
    assert said.returncode == 0, said.stderr
    return find_session(json.loads(said.stdout)["session"])


def port_of(folder: SessionFolder) -> int:
    return int(folder.read().address.rpartition(":")[2])


def lose_manager(world: World, folder: SessionFolder) -> None:
    there = lease.read_lease(folder.lease)
    assert there is not None
    managers = [pid for pid in world.of("stoker.manager.main") if str(folder.path) in command_of(pid)]
    kill([pid for pid in managers if "--kept" in command_of(pid)])
    kill([there.pid])
    until(lambda: not interfaces.is_listening(folder.read().address), why="the kernel closes its port")


def states(world: World) -> dict[str, str]:
    told = json.loads(stoker(world, "sessions", "--json").stdout)
    return {each["session"]: each["state"] for each in told["sessions"]}


def test_lost_session_restarts_on_another_port(world: World) -> None:
    first = free_ports(2)
    lost = up(world, first, first + 1)
    name, port = lost.read().session, port_of(lost)
    lose_manager(world, lost)
    other = up(world, port, pilots=0)
    assert port_of(other) == port
    assert states(world) == {name: "lost", other.read().session: "up"}
    shown = stoker(world, "status", name)
    assert f"the manager of session {name} has ended; `stoker attach {name}` restarts the manager" in shown.stdout

    assert output_of(world.start(PROGRAM, name)) == "2\n"
    assert port_of(lost) in {first, first + 1} - {port}, "it keeps to its range"
    assert states(world) == {name: "up", other.read().session: "up"}
    for folder in (lost, other):
        said = stoker(world, "down", folder.read().session)
        assert said.returncode == 0, said.stderr
    assert set(states(world).values()) == {"over"}


@pytest.mark.long
def test_error_for_a_taken_port_names_the_session_that_uses_it(world: World) -> None:
    lost = up(world, free_ports())
    name, port = lost.read().session, port_of(lost)
    lose_manager(world, lost)
    other = up(world, port, pilots=0).read().session
    began = time.monotonic()
    _, err = (program := world.start(PROGRAM, name)).communicate(timeout=100)
    assert program.returncode == 1
    assert (
        f"ports {port}-{port} are all taken (by session {other}); session {name} keeps the ports of its site file: free"
        f" one of them (`stoker down {other}`, or end another program that listens there), then `stoker attach {name}`"
    ) in err
    assert err.count("are all taken") == 1
    assert time.monotonic() - began < 60, "the error comes before a manager's start limit"

    said = stoker(world, "down", name)
    assert said.returncode == 0, said.stderr
    assert f"session {name} has ended: 0 calls done, 1 pilot released, 1 job ended" in said.stdout
    assert states(world) == {name: "over", other: "up"}
    said = stoker(world, "down", other)
    assert said.returncode == 0, said.stderr


@pytest.fixture
def folder(world: World, tmp_path: Path) -> SessionFolder:
    return session_folder(tmp_path / "session")


@pytest.fixture
def manager(folder: SessionFolder) -> Iterator[Manager]:
    manager = Manager(folder)
    yield manager
    manager.close()


def test_frozen_manager_counts_as_running(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer_is_waited_for(*_: object) -> bool:
        raise AssertionError

    assert manager.process is not None
    manager.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(presence, "_answers_or_renews_lease", no_answer_is_waited_for)
    assert presence.is_manager_up(manager.folder)


@pytest.mark.long
def test_manager_that_does_not_listen_yet_is_neither_up_nor_gone(
    manager: Manager, folder: SessionFolder, tmp_path: Path
) -> None:
    other = session_folder(tmp_path / "other")
    other.launch.touch()
    other.write(SessionFile("other", wire.VERSION, folder.read().address, other.read_key("server").public))
    lease.take_lease(other.lease)
    assert not presence.is_manager_up(other)
    with pytest.raises(SessionEndedError, match=r"the manager of session other \(pid \d+ on .*\) does not listen yet"):
        Observer(other)


def test_ended_session_is_not_up_if_its_port_is_reused(manager: Manager) -> None:
    with Observer(manager.folder) as observer:
        observer.end("enough")
    assert manager.ended() == 0
    with socket.create_server(("127.0.0.1", port_of(manager.folder))):
        assert not presence.is_manager_up(manager.folder)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\0" * 40)], ids=["none", "damaged"])
def test_manager_without_a_lease_is_recognized_by_its_handshake(manager: Manager, damage) -> None:
    assert manager.process is not None
    # pause the manager, so that it does not rewrite the lease before the test damages the lease
    manager.process.send_signal(signal.SIGSTOP)
    damage(manager.folder.lease)
    manager.process.send_signal(signal.SIGCONT)
    assert presence.is_manager_up(manager.folder)


def test_handshake_detects_the_manager_of_another_session(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "MAX_CHECK_S", 100.0)
    other = session_folder(tmp_path / "other")
    file = manager.folder.read()
    other.write(SessionFile("other", wire.VERSION, file.address, other.read_key("server").public))
    began = time.monotonic()
    assert not presence.is_manager_up(other)
    assert time.monotonic() - began < 50, "the command does not wait for a lease"


@pytest.fixture
def elsewhere(folder: SessionFolder) -> Iterator[psutil.Process]:
    """A process in its own namespace that renews the lease of the session, like a manager on another machine. A
    listener that never answers uses the port of the manager.
    """
    if subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode:
        pytest.skip("process namespaces cannot be made here: needs root, or unprivileged namespaces")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        hold_lease(folder.lease, within=["unshare", "-pf", "--kill-child"]) as process,
    ):
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        folder.write(SessionFile("test", wire.VERSION, address, folder.read_key("server").public))
        [there] = psutil.Process(process.pid).children()
        yield there
        there.kill()


def test_remote_manager_that_renews_is_up(folder: SessionFolder, elsewhere: psutil.Process) -> None:
    assert presence.is_manager_up(folder)
    with pytest.raises(NoAnswerError, match=r"the manager of session test \(pid 1 on .*\) at tcp:.* does not answer"):
        Observer(folder, timeout_s=0.2).__enter__()
    said = r"its manager \(pid 1 on .*\) at tcp:.* but does not answer"
    with closing(ClientLink(folder)) as link, pytest.raises(SessionError, match=said):
        link.wait_joined(0.2)


def test_remote_manager_with_an_unrenewed_lease_is_gone(
    folder: SessionFolder, elsewhere: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "MAX_CHECK_S", 1.0)
    elsewhere.suspend()
    assert not presence.is_manager_up(folder)


@pytest.mark.long
def test_no_manager_starts_next_to_an_unreachable_remote_manager(
    folder: SessionFolder, elsewhere: psutil.Process
) -> None:
    folder.launch.write_text(json.dumps({"session": "test", "options": []}))
    before = lease.read_lease(folder.lease)
    assert before is not None
    assert detached.start_session_manager(folder, on_wait=lambda _: None).token == before.token
    assert "already has a manager (pid 1 on " in folder.manager_log.read_text()
    after = lease.read_lease(folder.lease)
    assert after is not None
    assert (after.token, after.counter > before.counter) == (before.token, True)
