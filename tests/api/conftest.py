"""Provide a manager socket that the test controls, and a private home folder."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from faults.world import until
from free_port import keep_port, listen_at
from polling import PATIENCE_S

import stoker
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.processes import create_session_folder
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.calls import CallEnd
from stoker.protocol.session import SessionFile, SessionFolder


@pytest.fixture(autouse=True, scope="session")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = getattr(request.module, "LOAD", {})
    with stoker.load(run_dir=str(tmp_path_factory.mktemp("runs")), **options) as session:
        yield session


@pytest.fixture(scope="session")
def run_program_in() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(folder: Path, text: str, *, command: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        (folder / "program.py").write_text(textwrap.dedent(text))
        words = [sys.executable, *command, "program.py"]
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def run_program(tmp_path: Path, run_program_in: Callable[..., Any]) -> Callable[..., subprocess.CompletedProcess[str]]:
    return functools.partial(run_program_in, tmp_path)


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


class Router:
    """The manager side of a link. `frames`: the received frames in order, as (sequence number, messages)."""

    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        self.frames: list[tuple[int, list[Any]]] = []
        self.sent = 0
        self._context = zmq.Context()
        self._read = wire.from_client_decoder()
        self._peer = b""
        self._port = keep_port()
        self._address = f"tcp://127.0.0.1:{self._port.getsockname()[1]}"
        self.listen()
        folder.write(SessionFile("test", wire.VERSION, self._address, folder.read_key("server").public))

    def listen(self) -> None:
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.curve_server = True
        self.socket.curve_secretkey = self.folder.read_key("server").secret.encode()
        listen_at(self._address, self.socket)

    def hang_up(self) -> None:
        """Close the connection but keep the port reserved, to imitate a killed manager."""
        self.socket.close(0)

    def break_connection(self, link: ClientLink) -> None:
        self.hang_up()
        until(lambda: not link._joined.is_set())
        self.frames.clear()

    def hear(self, wanted: type, *, count: int = 1) -> list[Any]:
        """Wait for `count` messages of this type, and return all messages since the previous `hear`."""

        until(lambda: self.read() or len(self.all(wanted)) >= count)
        return self.all(wanted)

    def read(self) -> None:
        while self.socket.poll(0):
            self._peer, data = self.socket.recv_multipart()
            frame = self._read(data)
            self.frames.append((frame.sequence, frame.messages))

    def all(self, wanted: type) -> list[Any]:
        return [message for _, messages in self.frames for message in messages if isinstance(message, wanted)]

    def say(self, *messages: Any) -> None:
        self.socket.send_multipart([self._peer, wire.encode(list(messages))])

    def welcome(self, *, number: int = 0) -> None:
        self.hear(to_manager.ClientHello)
        self.say(to_client.ClientWelcome("test", number))

    def calls(self, count: int) -> list[Any]:
        def specs() -> list[Any]:
            self.read()
            return [spec for message in self.all(to_manager.Submit) for spec in message.calls]

        until(lambda: len(specs()) >= count)
        return specs()

    def answer(self, ends: list[CallEnd], *, first: int | None = None) -> None:
        self.say(to_client.Results(self.sent if first is None else first, ends))
        self.sent += len(ends)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()
        self._port.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    folder = SessionFolder(tmp_path / "session")
    create_session_folder(folder)
    router = Router(folder)
    yield router
    router.close()


@pytest.fixture
def unwelcomed(router: Router) -> Iterator[ClientLink]:
    link = ClientLink(router.folder)
    yield link
    link.close()


@pytest.fixture
def link(router: Router, unwelcomed: ClientLink) -> ClientLink:
    router.welcome()
    unwelcomed.wait_joined(PATIENCE_S)
    return unwelcomed
