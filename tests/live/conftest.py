from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

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
    with closing(Manager(folder)) as manager:
        yield manager


@pytest.fixture
def peers(folder: SessionFolder) -> Iterator[Callable[..., Peer]]:
    numbers = itertools.count()
    with ExitStack() as made:

        def make(role: str, *, hello: bool = True, key: KeyPair | None = None, name: str = "", **facts: Any) -> Peer:
            """Make a peer. `facts`: fields of its hello."""
            peer = Peer(folder, role, name or f"{role}-{next(numbers)}", key=key)
            made.callback(peer.close)
            if hello:
                facts = {"session": peer.session} | facts
                said = say.ClientHello(wire.VERSION, **facts) if role == "client" else pilot_hello(**facts)
                peer.send(said, numbered=False)
            return peer

        yield make
