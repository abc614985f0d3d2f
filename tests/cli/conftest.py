from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_line import Stoker
from live.conftest import manager as manager
from live.conftest import peers as peers
from live.peers import Manager, Peer, Peers, session_folder

from stoker.manager.executor.processes import register_session
from stoker.protocol.session import SessionFolder


@pytest.fixture(autouse=True)
def _own_home_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    folder = session_folder(tmp_path / "session")
    register_session(folder, name="test")
    return folder


@pytest.fixture
def client(manager: Manager, peers: Peers) -> Peer:
    return peers("client", name="client-1")


@pytest.fixture
def pilot(manager: Manager, peers: Peers) -> Peer:
    return peers("pilot", name="n014-ab12")


@pytest.fixture
def stoker() -> Stoker:
    return Stoker()
