"""Run a real manager process and peers with the real protocol."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from polling import PATIENCE_S, polls

from stoker.contexts.recipe import BARE
from stoker.dealer import CurveKeys, open_socket
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.session import KeyPair, SessionFolder


def until(true: Callable[[], Any], *, seconds: float = PATIENCE_S, what: str = "it") -> Any:
    for _ in polls(seconds):
        found = true()
        if found:
            return found
    raise AssertionError(f"{what} did not happen within {seconds} s")


def key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def session_folder(path: Path) -> SessionFolder:
    """Make a session folder with keys, without starting a manager."""
    folder = SessionFolder(path)
    folder.create_folders()
    for role in ("server", "client", "pilot"):
        folder.write_key(role, key_pair())
    return folder


class Peer:
    """A client or pilot that speaks the real protocol over a real socket and records all messages."""

    def __init__(self, folder: SessionFolder, role: str, name: str, *, key: KeyPair | None = None) -> None:
        self.role, self.name = role, name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pair, there = key or folder.read_key(role), folder.read()
        keys = CurveKeys(there.server_key, pair.public, pair.secret)
        self.socket = open_socket(self._context, name=name, keys=keys)
        self.socket.reconnect_ivl = 50
        self.socket.connect(there.address)
        self.session = there.session
        self.heard: list[Any] = []
        self._read = wire.to_pilot_decoder() if role == "pilot" else wire.to_client_decoder()
        self.sequence = 0

    def send(self, *messages: Any, numbered: bool = True, as_it_is: bool = False) -> bytes:
        """Send a frame. Unless `as_it_is`, a pilot's hello says that all earlier frames were acknowledged."""
        if isinstance(messages[0], say.PilotHello) and not as_it_is:
            messages = (msgspec.structs.replace(messages[0], acknowledged=self.sequence), *messages[1:])
        if numbered:
            self.sequence += 1
        frame = wire.encode(list(messages), sequence=self.sequence if numbered else 0)
        self.socket.send(frame)
        return frame

    def listen(self, timeout_s: float = 0.0) -> list[Any]:
        fresh: list[Any] = []
        while self.socket.poll(int(timeout_s * 1000)):
            fresh += self._read(self.socket.recv()).messages
            timeout_s = 0
        self.heard += fresh
        return fresh

    def hear(self, kind: type, *, seconds: float = PATIENCE_S, where: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the next message of a kind, including earlier messages that were not returned yet."""

        def found() -> Any:
            for index, message in enumerate(self.heard):
                if isinstance(message, kind) and where(message):
                    return self.heard.pop(index)
            self.listen(0.02)
            return None

        return until(found, seconds=seconds, what=f"{self.name} hearing {kind.__name__}")

    def define(self, code: bytes = b"code") -> bytes:
        return self.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", code))  # type: ignore[arg-type]

    def submit(self, *calls: int, payload: bytes = b"arguments", recipe: str = "bare") -> bytes:
        return self.send(say.Submit("f", recipe, [CallSpec(call, payload) for call in calls]))  # type: ignore[arg-type]

    def status(self) -> to_client.Status:
        self.send(say.AskStatus(), numbered=False)
        found: to_client.Status = self.hear(to_client.Status)
        return found

    def serve(self) -> int:
        """Load the library that the manager starts; return its number."""
        library: int = self.hear(to_pilot.StartLibrary).library
        self.send(say.LibraryReady(library, 0.1, 0.2))  # type: ignore[arg-type]
        return library

    def end(self, *calls: int, library: int = 1, payload: bytes = b"result") -> None:
        ends = [CallEnd(call, True, payload, 0.001) for call in calls]  # type: ignore[arg-type]
        self.send(say.CallsEnded(library, ends))  # type: ignore[arg-type]

    def silent(self, seconds: float = 0.3) -> bool:
        return not self.listen(seconds)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


Peers = Callable[..., Peer]


def welcomed(peers: Peers, *roles: str) -> list[Peer]:
    made = [peers(role) for role in roles]
    for peer in made:
        peer.hear(to_client.ClientWelcome if peer.role == "client" else to_pilot.PilotWelcome)
    return made


RUN = """
import sys
from stoker.manager.main import main
sys.exit(main(sys.argv[1:]))
"""


class Manager:
    """A real manager process in a session folder. `patch`: Python code that modifies the manager first."""

    def __init__(self, folder: SessionFolder, *options: str, patch: str = "", name: str = "test") -> None:
        self.folder = folder
        self.name = name
        self.patch = patch
        self.options = options
        self.start()

    def start(self) -> None:
        before = self.folder.file.stat().st_mtime_ns if self.folder.file.exists() else 0
        log = self.folder.manager_log.stat().st_size if self.folder.manager_log.exists() else 0
        options = ["--session", str(self.folder.path), "--name", self.name, "--heartbeat", "20"]
        program = ["-c", self.patch + RUN] if self.patch else ["-m", "stoker.manager.main"]
        self.process = subprocess.Popen([sys.executable, *program, *options, *self.options])
        until(
            lambda: (
                self.folder.file.exists()
                and (before == 0 or b"listens on" in self.folder.manager_log.read_bytes()[log:])
            ),
            what="manager listening",
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def ended(self, *, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


def pilot_hello(session: str, **more: Any) -> say.PilotHello:
    devices = (say.DeviceFacts("cpu:0", "cpu", 8 * 10**9),)  # type: ignore[arg-type]
    return say.PilotHello(wire.VERSION, session, "here", os.getpid(), **({"devices": devices} | more))
