"""Network faults: unauthorized clients on every port, reset connections, broken links."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from batch.chaos import Stage, Step, Way
from faults.world import command_of, kill

CUT_S = (0.5, 4.0)
"""Minimum and maximum seconds without network: below and above the time after which a pilot is lost."""
SILENT_S = (0.5, 8.0)
_PIDFD_GETFD = 438
_LISTENS, _CONNECTED = "0A", "01"
_STRANGER = Path(__file__).with_name("chaos_stranger.py")


class End(NamedTuple):
    pid: int
    descriptor: int
    port: int


class Sockets:
    def __init__(self, stage: Stage, *, seed: int) -> None:
        self._stage = stage
        self._seed = seed
        self._turn = 0
        self._stranger = subprocess.Popen(
            stage.cluster.on_head(sys.executable, "-I", "-S", str(_STRANGER)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"]},
            cwd="/",
        )

    def close(self) -> None:
        self._stranger.communicate(timeout=60)

    def ways(self) -> dict[str, Way]:
        return {
            "garbage": Way(1400, lambda step: self._knock("garbage", step)),
            "much garbage": Way(200, lambda step: self._knock("flood", step)),
            "silent stranger": Way(800, lambda step: self._knock("silent", step)),
            "half a handshake": Way(600, lambda step: self._knock("half", step)),
            "wrong key": Way(500, lambda step: self._knock("hello", step)),
            "rude stranger": Way(800, lambda step: self._knock("reset", step)),
            "reset": Way(500, self._reset),
            "garbled library": Way(100, self._garble),
            "cable": Way(200, self._cut),
        }

    # ---- strangers

    def _knock(self, how: str, step: Step) -> str:
        doors = [(name, end) for name, end in self._sockets(_LISTENS)]
        if not doors:
            return ""
        node, end = step.of(doors)
        if self._stranger.poll() is not None:
            raise RuntimeError("the stranger has ended")
        self._turn += 1
        order = {
            "host": self._stage.cluster.shape.address(node),
            "port": end.port,
            "how": how,
            "seed": self._seed + self._turn,
            "hold_s": step.between(SILENT_S),
        }
        assert self._stranger.stdin is not None
        assert self._stranger.stdout is not None
        self._stranger.stdin.write(json.dumps(order) + "\n")
        self._stranger.stdin.flush()
        said = self._stranger.stdout.readline().strip()
        return f"{node}:{end.port} of {_module(end.pid)}" if said == "connected" else ""

    def _sockets(self, state: str) -> Iterator[tuple[str, End]]:
        """Yield the TCP sockets of the session's processes in one state."""
        tables: dict[str, dict[str, tuple[int, str]]] = {}
        seen = set[str]()
        for node, pid in self._stage.victims.everything():
            if node not in tables:
                tables[node] = _table(pid)
            for descriptor, inode in _descriptors(pid):
                port, now = tables[node].get(inode, (0, ""))
                if now == state and inode not in seen:
                    seen.add(inode)
                    yield node, End(pid, descriptor, port)

    # ---- connections

    def _reset(self, step: Step) -> str:
        """Reset a connection for both sides, like a firewall."""
        found = list(self._sockets(_CONNECTED))
        if not found:
            return ""
        node, end = step.of(found)
        with _taken(end) as descriptor:
            if descriptor is None:
                return ""
            nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
            _libc.connect(descriptor, nowhere, len(nowhere))
        return f"{node}, {_module(end.pid)}"

    def _garble(self, step: Step) -> str:
        """Write random bytes to the sockets between a library and the agent, like a faulty call; the library dies."""
        candidates = self._stage.victims.libraries()
        if not candidates:
            return ""
        node, pid = step.of(candidates)
        kill([pid], 19)
        try:
            if not self._stage.victims.is_innocent(pid):
                return ""
            own = [(number, inode) for number, inode in _descriptors(pid) if inode in _unix_streams(pid)]
            for number, _ in own:
                with _taken(End(pid, number, 0)) as descriptor:
                    if descriptor is not None:
                        with contextlib.suppress(OSError):
                            os.write(descriptor, os.urandom(8))
        finally:
            kill([pid], 18)
        return f"{node}, {len(own)} sockets" if own else ""

    def _cut(self, step: Step) -> str:
        cluster = self._stage.cluster
        node = step.of(cluster.shape.nodes)
        key, seconds = f"cable of {node}", step.between(CUT_S)
        if not self._stage.is_free(key):
            return ""
        cluster.cut(node)
        self._stage.hold(key, seconds, lambda: cluster.heal(node))
        return f"{node} for {seconds:.1f} s"


_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def _taken(end: End) -> Iterator[int | None]:
    """Yield a duplicate of a descriptor of another process; None if the process has exited."""
    try:
        process = os.pidfd_open(end.pid)
    except OSError:
        yield None
        return
    descriptor = _libc.syscall(_PIDFD_GETFD, process, end.descriptor, 0)
    os.close(process)
    if descriptor < 0:
        yield None
        return
    try:
        os.set_blocking(descriptor, False)
        yield descriptor
    finally:
        os.close(descriptor)


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path))
                if found:
                    yield int(entry.name), found.group(1)


def _table(pid: int) -> dict[str, tuple[int, str]]:
    """Return local port and state of the TCP sockets in the network namespace of a process, by inode."""
    found: dict[str, tuple[int, str]] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                found[words[9]] = int(words[1].rpartition(":")[2], 16), words[3]
    return found


def _unix_streams(pid: int) -> set[str]:
    """Return inodes of connected Unix stream sockets in the network namespace of a process."""
    try:
        lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    except OSError:
        return set()
    rows = [line.split() for line in lines]
    return {row[6] for row in rows if row[4] == "0001" and row[5] == "03"}


def _module(pid: int) -> str:
    found = [word for word in command_of(pid) if word.startswith("stoker.") or word.endswith(".py")]
    return Path(found[0]).name if found else "a process"
