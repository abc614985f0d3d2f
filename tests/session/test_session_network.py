from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from faults.world import World
from live.peers import key_pair, session_folder
from session.test_session_up import stoker

from stoker.errors import SessionError
from stoker.manager.executor import membership
from stoker.manager.executor.client import ClientLink
from stoker.manager.live.interfaces import explain_missing_route
from stoker.protocol import wire
from stoker.protocol.session import SessionFile, SessionFolder

NO_NETWORK = ["unshare", "--net"]
JOIN = """
import sys
from stoker.manager.executor.client import ClientLink
from stoker.protocol.session import SessionFolder
ClientLink(SessionFolder(sys.argv[1])).wait_joined(0.3)
"""
DOWN = f"the loopback interface of {socket.gethostname()} is down; bring it up: ip link set lo up"


def _can_unshare() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    return not subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode


without_network = pytest.mark.skipif(not _can_unshare(), reason="a machine without a network needs root and unshare(1)")


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    return session_folder(tmp_path / "session")


@without_network
def test_program_reports_that_the_loopback_is_down(folder: SessionFolder) -> None:
    folder.write(SessionFile("test", wire.VERSION, "tcp://127.0.0.1:1", key_pair().public))
    said = subprocess.run([*NO_NETWORK, sys.executable, "-c", JOIN, str(folder.path)], capture_output=True, text=True)
    assert said.returncode == 1
    end = f"SessionError: session test: its manager at tcp://127.0.0.1:1 cannot be reached: {DOWN}"
    assert said.stderr.splitlines()[-1].endswith(end)


@without_network
def test_command_reports_that_the_loopback_is_down(tmp_path: Path) -> None:
    with World(tmp_path / "world").entered() as world:
        up = stoker(world, "up")
        assert up.returncode == 0, up.stderr
        for command in ("status", "down"):
            there = [*NO_NETWORK, sys.executable, "-m", "stoker.manager.cli.entry", command]
            said = subprocess.run(there, capture_output=True, text=True, timeout=100, cwd=tmp_path)
            assert said.returncode == 1
            assert said.stderr.rstrip().endswith(f"cannot be reached: {DOWN}")
        down = stoker(world, "down")
        assert down.returncode == 0, down.stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://nowhere.invalid:80", "tcp://127.0.0.1:99999", "junk"])
def test_missing_route_is_not_reported_on_a_working_network(address: str) -> None:
    assert explain_missing_route(address) == ""


@pytest.mark.parametrize(
    ("listens", "why"),
    [(True, "accepts connections but does not answer"), (False, "no longer listens there")],
    ids=["silent", "gone"],
)
def test_error_about_an_unanswered_join_refers_to_the_log(
    folder: SessionFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listens: bool, why: str
) -> None:
    monkeypatch.setattr(membership, "SLOW_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if listens else 1
        folder.write(SessionFile("test", wire.VERSION, f"tcp://127.0.0.1:{port}", key_pair().public))
        with closing(ClientLink(folder)) as link, pytest.raises(SessionError, match=f"{why}; its log may show why"):
            link.wait_joined(0.3)
    [said] = [record.getMessage() for record in caplog.records if "this program waits" in record.getMessage()]
    assert said.startswith(f"session test: its manager at tcp://127.0.0.1:{port} {why}")
    assert str(folder.manager_log) in said
