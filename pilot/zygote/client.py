"""The agent's side of a zygote, and the messages: MessagePack packets over a socket pair."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker import connections
from stoker.decoding import UNREADABLE
from stoker.log_files import RateLimitedLog

# ---- messages

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)  # fmt: skip
"""Environment variables with the thread counts of numeric libraries, which read the variables on import."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- to the zygote


class Preload(_Message, frozen=True, tag="preload"):
    """Import modules (or `module:attribute` of lazy packages). Always the first message."""

    modules: tuple[str, ...]


class Fork(_Message, frozen=True, tag="fork"):
    """Start a library. The packet carries the library's socket. `entry`: `module:function`; `fresh`: True for a new
    interpreter.
    """

    library: int
    entry: str
    log: str
    folder: str
    environment: dict[str, str]
    cores: tuple[int, ...] = ()
    threads: int = 1
    fresh: bool = False


class Kill(_Message, frozen=True, tag="kill"):
    library: int


ToZygote = Preload | Fork | Kill


# ---- to the agent


class Preloaded(_Message, frozen=True, tag="preloaded"):
    failed: dict[str, str]
    seconds: float
    threads: dict[str, str] = {}
    asked_for_gpus: bool = False


class Forked(_Message, frozen=True, tag="forked"):
    library: int
    pid: int


class ForkFailed(_Message, frozen=True, tag="fork-failed"):
    library: int
    reason: str


class Exited(_Message, frozen=True, tag="exited"):
    """A library has exited. `orphans`: number of its descendants that the zygote killed."""

    library: int
    signal: int
    exit_code: int
    orphans: int = 0


FromZygote = Preloaded | Forked | ForkFailed | Exited

MAX_PACKET_BYTES = 200_000  # maximum packet length


# ---- the agent's end

_decode = msgspec.msgpack.Decoder[FromZygote](FromZygote).decode
_encode = msgspec.msgpack.Encoder().encode
_refusals = RateLimitedLog(logging.getLogger("stoker.pilot"))
_ENTRY_MODULES = ("stoker.pilot.library.main",)


class Zygote:
    """A zygote for one set of preloaded modules. The zygote dies with the thread that started it."""

    def __init__(
        self, preload: tuple[str, ...], *, log: Path, scratch: Path, environ: Mapping[str, str], umask: int = -1
    ) -> None:
        """Raises OSError."""
        self.preload = preload
        self.log = log
        self.has_preloaded = False
        self.libraries: set[int] = set()
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        """Queued orders and sockets. A zygote reads no orders while it imports modules."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        single = dict.fromkeys(THREAD_VARIABLES, "1")
        single |= {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        single["CUDA_VISIBLE_DEVICES"] = ""  # hide the GPUs: CUDA fails after a fork; each library sets its own value
        arguments = map(str, (theirs.fileno(), os.getpid(), scratch))
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stoker.pilot.zygote", *arguments], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**environ, **single},
                start_new_session=True, umask=umask,
            )  # fmt: skip
        connections.restore_descriptor_limit(self._process.pid)
        self._sock.setblocking(False)
        self._send_order(Preload(modules=(*_ENTRY_MODULES, *preload)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fork_library(self, order: Fork, sock: socket.socket) -> None:
        """Order the start of a library that uses `sock`, and close `sock` here. Raises OSError."""
        self._unsent.append((_encode(order), sock))
        try:
            self._send_queued()
        except OSError:
            self._drop_unsent()
            raise
        self.libraries.add(order.library)

    def kill_library(self, library: int) -> None:
        self._send_order(Kill(library))

    def _send_order(self, order: ToZygote) -> None:
        self._unsent.append((_encode(order), None))
        self.send_unsent()

    def send_unsent(self) -> None:
        try:
            self._send_queued()
        except OSError:
            self._drop_unsent()
            self.kill_zygote()

    def _send_queued(self) -> None:
        while self._unsent:
            data, sock = self._unsent[0]
            try:
                socket.send_fds(self._sock, [data], [sock.fileno()] if sock is not None else [])
            except BlockingIOError:
                return
            self._unsent.popleft()
            if sock is not None:
                sock.close()

    def receive_messages(self) -> list[FromZygote] | None:
        """Return the received messages; None after the zygote's end."""
        said: list[FromZygote] = []
        while True:
            try:
                data = self._sock.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return said
            except OSError:
                data = b""
            if not data:
                return said or None
            try:
                said.append(_decode(data))
            except UNREADABLE as error:  # an imported module wrote to the socket
                _refusals.warning(str(self.pid), f"refused {len(data)} bytes of zygote {self.pid}: {error}")

    def close(self) -> None:
        """Make the zygote kill its libraries, remove the scratch folder and exit."""
        self._drop_unsent()
        self._sock.close()

    def wait_for_end(self, timeout_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill_zygote(self) -> None:
        """Kill the zygote. `receive_messages` then returns None."""
        self._process.kill()

    def kill_and_reap(self) -> None:
        self.close()
        self._process.kill()
        self._process.wait()

    def _drop_unsent(self) -> None:
        for _, sock in self._unsent:
            if sock is not None:
                sock.close()
        self._unsent.clear()
