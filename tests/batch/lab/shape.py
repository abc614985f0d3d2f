from __future__ import annotations

import enum
import os
import pwd
import socket
from dataclasses import dataclass, field
from pathlib import Path


class LabError(Exception):
    """A failure of the lab itself; the message has the last lines of its logs."""


class Preempt(enum.Enum):
    """Effect on a `backfill` job if a `main` job needs its node."""

    REQUEUE = "REQUEUE"
    """The job returns to the queue."""
    CANCEL = "CANCEL"
    """The job ends."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    gpus: tuple[str, ...] = ("a10:1", "a10:1", "titanx:1", "titanx:1")
    cpus: int = 4
    memory_mb: int = 4000
    preempt: Preempt = Preempt.REQUEUE
    grace_s: int = 0
    kill_wait_s: int = 2
    node_timeout_s: int = 30
    namespaces: bool = False
    accounting: bool = False
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, len(self.gpus) + 1))

    def address(self, machine: str) -> str:
        if not self.namespaces:
            return "127.0.0.1"
        return "10.77.0.1" if machine == "head" else f"10.77.0.{10 + self.nodes.index(machine) + 1}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folder of a cluster, and consecutive free ports from `port` on."""

    root: Path
    port: int
    user: str = field(default_factory=lambda: pwd.getpwuid(os.getuid()).pw_name)

    @property
    def conf(self) -> Path:
        """The slurm.conf of clients, next to the other configuration files."""
        return self.root / "etc" / "slurm.conf"

    @property
    def daemons_conf(self) -> Path:
        return self.conf.with_name("daemons.conf")

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def munge(self) -> Path:
        return self.run / "munge.sock"

    def make(self) -> None:
        """Make the lock and the folders. munged requires that every user can read the folders, with any umask."""
        for folder in (self.conf.parent, self.logs, self.run, self.root / "state", self.root / "dev"):
            folder.mkdir()
            folder.chmod(0o755)
        self.lock.touch()


FIRST_PORT, LAST_PORT = 22_000, 31_900
"""Ports above those of sessions and below the ephemeral ports of the kernel."""


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports. Concurrent runs search from different ports."""
    rows = list(range(FIRST_PORT, LAST_PORT, 50))
    start = os.getpid() % len(rows)
    for first in rows[start:] + rows[:start]:
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise LabError(f"no {count} free ports in a row between {FIRST_PORT} and {LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
