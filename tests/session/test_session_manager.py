from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
from faults.world import World, kill, until
from live.peers import Peer, pilot_hello, session_folder
from polling import PATIENCE_S
from session.test_session_lease import insist
from session.test_session_ports import free_ports

from stoker.contexts.recipe import BARE
from stoker.errors import ConfigError, SessionError
from stoker.manager.executor.client import ClientLink
from stoker.manager.live import interfaces, lease
from stoker.manager.live.replay import status_of_ended_session
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallSpec
from stoker.protocol.session import SessionFolder


@pytest.fixture
def folder(world: World, tmp_path: Path) -> SessionFolder:
    return session_folder(tmp_path / "session")


def written_at(folder: SessionFolder) -> int:
    return folder.file.stat().st_mtime_ns if folder.file.exists() else 0


class Managers:
    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "stoker.manager.main", "--session", str(self.folder.path), "--name", "test"]
        written = written_at(self.folder)
        process = subprocess.Popen([*command, "--heartbeat", "1", *options], stderr=subprocess.DEVNULL)
        self.started.append(process)
        until(lambda: process.poll() is not None or written_at(self.folder) != written, why="the manager listens")
        return process


@pytest.fixture
def managers(folder: SessionFolder) -> Iterator[Managers]:
    managers = Managers(folder)
    yield managers
    for process in managers.started:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)


def is_whole(folder: SessionFolder) -> bool:
    try:
        return bool(folder.read())
    except SessionError:
        return False


def test_lost_address_file_is_written_again(managers: Managers) -> None:
    process, folder = managers.start(), managers.folder
    before = folder.read()
    for damage, said in ((Path.unlink, "was removed"), (lambda path: path.write_bytes(b""), "is damaged: .*")):
        damage(folder.file)
        folder.lease.unlink()
        until(lambda: is_whole(folder) and folder.lease.exists())
        assert folder.read() == before
        assert re.search(rf"session.json {said}; it is written again", folder.manager_log.read_text())
    with closing(ClientLink(folder)) as link:
        link.wait_joined(PATIENCE_S)
    assert process.poll() is None


STARTS = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "stoker.manager.main", "--session", sys.argv[1], "--parent", str(os.getpid())]
print(subprocess.Popen(command).pid, flush=True)
time.sleep(600)
"""


def test_manager_ends_soon_if_its_program_dies_before_joining(folder: SessionFolder) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, str(folder.path)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        manager = psutil.Process(int(program.stdout.readline()))
        try:
            until(folder.file.exists)
            program.kill()
            manager.wait(PATIENCE_S)
        finally:
            if manager.is_running():
                manager.kill()
            program.kill()


def test_second_manager_does_not_start(managers: Managers) -> None:
    first = managers.start()
    second = subprocess.run(
        [sys.executable, "-m", "stoker.manager.main", "--session", str(managers.folder.path)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 3
    assert f"already has a manager (pid {first.pid} on " in second.stderr
    assert first.poll() is None


def test_replaced_manager_stops_at_once(managers: Managers) -> None:
    first = managers.start()
    path = managers.folder.lease
    other = msgspec.structs.replace(lease.read_lease(path), token="another", host="login2", machine="another")
    until(lambda: first.poll() is not None or insist(path, other))
    assert first.returncode == 3
    assert "no longer manages the session: its manager is pid" in managers.folder.manager_log.read_text()
    assert lease.read_lease(path) == other


def test_manager_whose_port_is_taken_listens_on_another_port(managers: Managers) -> None:
    managers.start()
    before = managers.folder.read()
    with closing(ClientLink(managers.folder)) as link:
        link.wait_joined(PATIENCE_S)
        kill([managers.started[0].pid])
        managers.started[0].wait(PATIENCE_S)
        port = int(before.address.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)):
            managers.start()
            after = managers.folder.read()
            assert after.address != before.address
            assert msgspec.structs.replace(after, address=before.address) == before
            assert link.ask_status().result(PATIENCE_S).session == "test"


def test_manager_listens_only_on_given_ports_and_interface(managers: Managers) -> None:
    free = free_ports(2)
    with socket.create_server(("127.0.0.1", free + 1)):
        manager = managers.start("--ports", f"{free}-{free + 1}", "--interface", "lo")
        assert manager.poll() is None, managers.folder.manager_log.read_text()
        assert managers.folder.read().address == f"tcp://127.0.0.1:{free}"
        listening = [one for one in psutil.Process(manager.pid).net_connections() if one.status == psutil.CONN_LISTEN]
        assert [one.laddr for one in listening] == [("127.0.0.1", free)]


def test_manager_exits_and_names_its_ports_if_all_are_taken(managers: Managers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        manager = managers.start("--ports", f"{port}-{port}", "--interface", "lo")
        assert manager.wait(PATIENCE_S) == 1
    assert not managers.folder.file.exists()
    assert f"ports {port}-{port} are all taken" in managers.folder.manager_log.read_text()


def test_kept_session_outlives_its_clients_but_their_calls_do_not(managers: Managers) -> None:
    process = managers.start("--detached", "--heartbeat", "10")
    pilot = Peer(managers.folder, "pilot", "n014-ab12")
    pilot.send(pilot_hello(pilot.session), numbered=False)
    pilot.hear(to_pilot.PilotWelcome)
    client = Peer(managers.folder, "client", "client-1")
    client.send(say.ClientHello(wire.VERSION, client.session), numbered=False)
    number = client.hear(to_client.ClientWelcome).number
    client.send(
        say.DefineRecipe(BARE),
        say.DefineFunction("f1", "verify", b"blob"),
        say.Submit("f1", "bare", [CallSpec(number << 40 | 1, b"arguments")]),
    )
    start = pilot.hear(to_pilot.StartLibrary)
    pilot.send(say.LibraryReady(start.library, 0.1, 0.2, resident_bytes=1_000_000))
    pilot.hear(to_pilot.RunCalls)
    client.close()
    cancelled = pilot.hear(to_pilot.CancelCalls, seconds=20)
    assert cancelled.calls == (number << 40 | 1,)
    assert process.poll() is None
    kill([process.pid])  # the journal also records that the session is kept
    process.wait(PATIENCE_S)
    status = status_of_ended_session(managers.folder)
    assert (status.cancelled, len(status.pilots)) == (1, 1)
    pilot.close()


def test_connected_client_keeps_a_session_from_being_idle(managers: Managers) -> None:
    process = managers.start("--detached", "--idle", "3")
    client = Peer(managers.folder, "client", "client-1")
    client.send(say.ClientHello(wire.VERSION, client.session), numbered=False)
    client.hear(to_client.ClientWelcome)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(4)
    client.close()
    assert process.wait(PATIENCE_S) == 0


def test_keeper_restarts_a_killed_manager_but_not_an_ended_manager(managers: Managers) -> None:
    keeper = managers.start("--detached", "--kept")
    first = lease.read_lease(managers.folder.lease)
    assert first is not None
    assert first.pid != keeper.pid
    kill([first.pid])
    second = until(lambda: _other(managers.folder, first), why="another manager")
    until(lambda: interfaces.is_listening(managers.folder.read().address))
    client = Peer(managers.folder, "client", "client-1")
    client.send(say.ClientHello(wire.VERSION, client.session), say.EndSession("enough"), numbered=False)
    assert keeper.wait(PATIENCE_S) == 0
    assert lease.read_lease(managers.folder.lease).over == "enough"
    assert not Path(f"/proc/{second.pid}").exists()
    client.close()


def test_terminated_keeper_ends_its_manager(managers: Managers) -> None:
    keeper = managers.start("--detached", "--kept")
    keeper.send_signal(signal.SIGTERM)
    keeper.wait(PATIENCE_S)
    holder = lease.read_lease(managers.folder.lease)
    assert holder is not None
    until(lambda: lease.is_holder_alive(holder) is False)
    assert not holder.over


def test_automatic_network_choice_avoids_the_loopback_if_possible() -> None:
    there = {"lo": "127.0.0.1", "eth0": "192.168.1.5", "ib0": "10.4.0.2"}
    assert interfaces.choose_address(there, named=["10.4.0.2"], route_address="192.168.1.5") == "10.4.0.2"
    assert interfaces.choose_address(there, named=["127.0.1.1"], route_address="192.168.1.5") == "192.168.1.5"
    assert interfaces.choose_address(there, named=["172.16.0.9"], route_address="") == "192.168.1.5"
    assert interfaces.choose_address({"lo": "127.0.0.1"}, named=[], route_address="") == "127.0.0.1"


def test_unknown_network_error_names_the_existing_networks() -> None:
    assert interfaces.resolve_interface("lo") == "127.0.0.1"
    assert interfaces.resolve_interface("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'l0' is not a network of this host \(.*lo 127\.0\.0\.1.*did you mean lo\?"):
        interfaces.resolve_interface("l0")
    for address in ("::1", "fe80::1%eth0", "2001:db8::7"):
        with pytest.raises(
            ConfigError, match=r"is an IPv6 address, and a manager listens on IPv4: name one of .*lo 127"
        ):
            interfaces.resolve_interface(address)
    with pytest.raises(ConfigError, match="'eth0:7' is not a network of this host"):
        interfaces.resolve_interface("eth0:7")


def _other(folder: SessionFolder, before: lease.LeaseHolder) -> lease.LeaseHolder | None:
    holder = lease.read_lease(folder.lease)
    return holder if holder is not None and holder.token != before.token else None
