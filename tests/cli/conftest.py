from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cli.command_line import Stoker
from live.peers import Manager, Peer, pilot_hello, session_folder

from stoker.manager.executor.processes import register
from stoker.protocol import to_manager as say
from stoker.protocol import wire
from stoker.protocol.session import SessionFolder


@pytest.fixture(autouse=True)
def _own_home_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    folder = session_folder(tmp_path / "session")
    register(folder, name="test")
    return folder


@pytest.fixture
def manager(folder: SessionFolder) -> Iterator[Manager]:
    with closing(Manager(folder)) as manager:
        yield manager


@pytest.fixture
def client(manager: Manager) -> Iterator[Peer]:
    with closing(Peer(manager.folder, "client", "client-1")) as peer:
        peer.send(say.ClientHello(wire.VERSION, peer.session), numbered=False)
        yield peer


@pytest.fixture
def pilot(manager: Manager) -> Iterator[Peer]:
    with closing(Peer(manager.folder, "pilot", "n014-ab12")) as peer:
        peer.send(pilot_hello(peer.session), numbered=False)
        yield peer


@pytest.fixture
def stoker() -> Stoker:
    return Stoker()
