"""The manager's side of a factory connection. Sockets and keys are real; the test gives the orders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from stoker.manager.live.sockets import ManagerSockets
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.blocks import BlockOrder, BlockPhase, KnownBlock
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFile, SessionFolder
from stoker.protocol.to_manager import BlockUpdate, ClientHello


class ManagerEnd:
    """Welcomes a factory with the blocks in `known`; acknowledges and records its messages."""

    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        self.known: tuple[KnownBlock, ...] = ()
        self.answers = True
        """True if a hello is answered."""
        self.hellos: list[bytes] = []
        self.news: list[BlockUpdate] = []
        self.troubles: list[to_manager.SourceTrouble] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sockets: ManagerSockets | None = None
        self._last: dict[bytes, int] = {}
        self._read = wire.from_client_decoder()
        self.open()

    # ---- the manager

    def open(self) -> None:
        self.sockets = ManagerSockets(self.folder)
        key = self.folder.read_key("server").public
        self.folder.write(SessionFile("k3v9", wire.VERSION, self.sockets.address, key))

    def leave(self) -> None:
        if self.sockets is not None:
            self.sockets.close()
            self.sockets = None

    def tell(self, *messages: Any) -> None:
        assert self.sockets is not None
        self.sockets.send(self.hellos[-1], wire.encode(list(messages)))

    def submit(self, *blocks: str, source: str = "lab") -> None:
        self.tell(to_client.SubmitBlocks(tuple(BlockOrder(BlockId(block), source) for block in blocks)))

    def cancel(self, *blocks: str, reason: str = "nothing to do") -> None:
        self.tell(to_client.CancelBlocks(tuple(map(BlockId, blocks)), reason))

    def turn(self) -> None:
        assert self.sockets is not None
        self.sockets.wait(20)
        for _, peer, data in self.sockets.read_frames():
            frame = self._read(data)
            if frame.sequence and frame.sequence != self._last.get(peer, 0) + 1:
                continue  # the frame is repeated, or an earlier frame is missing
            if frame.sequence:
                self._last[peer] = frame.sequence
                self.sockets.send(peer, wire.encode([to_client.Ack(frame.sequence)]))
            for message in frame.messages:
                self._hear(peer, message)

    def _hear(self, peer: bytes, message: Any) -> None:
        match message:
            case ClientHello():
                assert message.factory
                self.hellos.append(peer)
                if self.answers:
                    self.tell(to_client.ClientWelcome("k3v9", 0), to_client.KnownBlocks(self.known))
            case BlockUpdate():
                self.news.append(message)
            case to_manager.SourceTrouble():
                self.troubles.append(message)

    def until(self, true: Callable[[], Any], *, what: str, seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.sockets is not None:
                self.turn()
            else:
                time.sleep(0.02)
            found = true()
            if found:
                return found
        said = (self.folder.path / "factory.log").read_text() if (self.folder.path / "factory.log").exists() else ""
        raise AssertionError(f"{what} did not happen within {seconds} s; heard {self.news} {self.troubles}\n{said}")

    def hear(
        self, block: str, phase: BlockPhase, *, where: Callable[[BlockUpdate], bool] = lambda _: True
    ) -> BlockUpdate:
        """Return the first matching update, including earlier updates."""

        def found() -> BlockUpdate | None:
            return next((n for n in self.news if n.block == block and n.phase is phase and where(n)), None)

        heard: BlockUpdate = self.until(found, what=f"{block} {phase.value}")
        return heard

    def hear_trouble(self, part: str) -> to_manager.SourceTrouble:
        def found() -> to_manager.SourceTrouble | None:
            return next((t for t in self.troubles if (part in t.text if part else not t.text)), None)

        heard: to_manager.SourceTrouble = self.until(found, what=f"trouble {part!r}")
        return heard

    # ---- the factory

    def start_factory(self, *options: str, wait: bool = True) -> subprocess.Popen[bytes]:
        before = len(self.hellos)
        words = [sys.executable, "-P", "-m", "stoker.manager.factory.main", "--session", str(self.folder.path)]
        process = subprocess.Popen([*words, *options], start_new_session=True)
        self.processes.append(process)
        if wait:
            self.until(lambda: len(self.hellos) > before, what="the factory's hello")
        return process

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        self.until(lambda: process.poll() is not None, what="the factory's end")
        return int(process.returncode)

    def end(self, process: subprocess.Popen[bytes]) -> int:
        self.tell(to_client.SessionOver("the program is done"))
        return self.ended(process)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)
        self.leave()
