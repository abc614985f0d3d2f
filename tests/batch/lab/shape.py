"""The shape and the place of a cluster."""

from __future__ import annotations

import enum
import os
import pwd
import socket
from dataclasses import dataclass, field
from pathlib import Path


class LabError(Exception):
    """The lab itself failed; the message has the last lines of its logs."""


class Preempt(enum.Enum):
    """The fate of a job of `backfill` when a job of `main` wants its node."""

    REQUEUE = "REQUEUE"
    """It goes back into the queue."""
    CANCEL = "CANCEL"
    """It is over."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The properties of a cluster."""

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
    """The place of a cluster: its folder, and a row of free ports from `port` on."""

    root: Path
    port: int
    user: str = field(default_factory=lambda: pwd.getpwuid(os.getuid()).pw_name)

    @property
    def conf(self) -> Path:
        """slurm.conf of users' commands; the other configuration files are in the same folder."""
        return self.root / "etc" / "slurm.conf"

    @property
    def daemons_conf(self) -> Path:
        return self.conf.with_name("daemons.conf")

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        """Sockets, process ids, and slurmd's records of its jobs."""
        return self.root / "run"

    @property
    def lock(self) -> Path:
        """Held, shared, by every machine as long as it lives."""
        return self.root / "lock"

    @property
    def munge(self) -> Path:
        return self.run / "munge.sock"

    def make(self) -> None:
        """Make the folders and the lock. munged wants folders that everybody can reach, whatever the umask here."""
        for folder in (self.conf.parent, self.logs, self.run, self.root / "state", self.root / "dev"):
            folder.mkdir()
            folder.chmod(0o755)
        self.lock.touch()


FIRST_PORT, LAST_PORT = 22_000, 31_900
"""Between the ports of sessions and the kernel's ephemeral ports."""


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row; runs that start together begin to look at different places."""
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
