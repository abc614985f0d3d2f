from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live.peers import Manager, Peer, pilot_hello, session_folder

from stoker.protocol import to_manager as say
from stoker.protocol import wire
from stoker.protocol.session import KeyPair, SessionFolder


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    return session_folder(tmp_path / "session")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def manager(folder: SessionFolder) -> Iterator[Manager]:
    manager = Manager(folder)
    yield manager
    manager.close()


@pytest.fixture
def peers(folder: SessionFolder) -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []
    numbers = itertools.count()

    def make(role: str, *, hello: bool = True, key: KeyPair | None = None, name: str = "") -> Peer:
        peer = Peer(folder, role, name or f"{role}-{next(numbers)}", key=key)
        made.append(peer)
        if hello and role == "client":
            peer.send(say.ClientHello(wire.VERSION, peer.session), numbered=False)
        elif hello:
            peer.send(pilot_hello(peer.session), numbered=False)
        return peer

    yield make
    for peer in made:
        peer.close()
