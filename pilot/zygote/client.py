"""The agent's end of a zygote."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stoker import connections
from stoker.decoding import UNREADABLE
from stoker.log_files import SeldomLog
from stoker.pilot.zygote.child import THREAD_VARIABLES
from stoker.pilot.zygote.messages import LIMIT_BYTES, Fork, FromZygote, Kill, Preload, ToZygote

_decode = msgspec.msgpack.Decoder[FromZygote](FromZygote).decode
_encode = msgspec.msgpack.Encoder().encode
_refusals = SeldomLog(logging.getLogger("stoker.pilot"))
_ENTRY_MODULES = ("stoker.pilot.library.main",)


class Zygote:
    """A zygote for one set of preloaded modules. It is made from the thread that it dies with."""

    def __init__(
        self, preload: tuple[str, ...], *, log: Path, scratch: Path, environ: Mapping[str, str], umask: int = -1
    ) -> None:
        """Start it. `scratch` is the folder that it removes if this process dies without a word, `umask` the one that
        its libraries have (-1: this process's). Raises OSError."""
        self.preload = preload
        self.log = log
        self.ready = False
        self.libraries: set[int] = set()
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        """Orders that wait until the zygote reads, which it does not while it imports; each with the socket that goes
        along."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        single = dict.fromkeys(THREAD_VARIABLES, "1")
        single |= {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        single["CUDA_VISIBLE_DEVICES"] = ""  # each library gets its own; CUDA that is initialised survives no fork
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "stoker.pilot.zygote",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(scratch),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environ, **single},
                start_new_session=True,
                umask=umask,
            )
        connections.restore_descriptor_limit(self._process.pid)
        self._sock.setblocking(False)
        self._send(Preload(modules=(*_ENTRY_MODULES, *preload)))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """For a poller."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether orders wait for room in the socket."""
        return bool(self._unsent)

    def fork(self, order: Fork, sock: socket.socket) -> None:
        """Ask for a library that talks over `sock`, which this process then no longer has. Raises OSError."""
        self._unsent.append((_encode(order), sock))
        try:
            self._push()
        except OSError:
            self._drop_unsent()
            raise
        self.libraries.add(order.library)

    def push(self) -> None:
        """Send what waits, as far as there is room. A zygote to which nothing can be sent ends: `receive` says so."""
        try:
            self._push()
        except OSError:
            self._drop_unsent()
            self.stop()

    def _push(self) -> None:
        while self._unsent:
            data, sock = self._unsent[0]
            try:
                if sock is None:
                    self._sock.send(data)
                else:
                    socket.send_fds(self._sock, [data], [sock.fileno()])
            except BlockingIOError:
                return
            self._unsent.popleft()
            if sock is not None:
                sock.close()

    def kill(self, library: int, how: int = signal.SIGKILL) -> None:
        """Send a signal to a library."""
        self._send(Kill(library=library, signal=how))

    def receive(self) -> list[FromZygote] | None:
        """What it has said; None when it has ended."""
        said: list[FromZygote] = []
        while True:
            try:
                data = self._sock.recv(LIMIT_BYTES)
            except BlockingIOError:
                return said
            except OSError:
                data = b""
            if not data:
                return said or None
            try:
                said.append(_decode(data))
            except UNREADABLE as error:  # a module that it imported writes to its socket
                _refusals.warning(str(self.pid), f"refused {len(data)} bytes of zygote {self.pid}: {error}")

    def close(self) -> None:
        """Let it end: it kills its libraries and removes the scratch folder by itself."""
        self._drop_unsent()
        self._sock.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Kill it; `receive` then says that it has ended."""
        self._process.kill()

    def destroy(self) -> None:
        """Kill it, and with it its libraries."""
        self._drop_unsent()
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: ToZygote) -> None:
        self._unsent.append((_encode(message), None))
        self.push()

    def _drop_unsent(self) -> None:
        for _, sock in self._unsent:
            if sock is not None:
                sock.close()
        self._unsent.clear()
