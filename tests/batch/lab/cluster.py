"""A cluster of machines with separate networks: a bridge on the head, a link to each node."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from batch.lab import texts
from batch.lab.commands import Commands, until
from batch.lab.handle import Handle, environment
from batch.lab.shape import LabError, Place, Shape, free_ports
from polling import PATIENCE_S

# ---- network


def set_up_bridge(head: Handle, nodes: Sequence[Handle], *, shape: Shape, place: Place) -> None:
    """Name and connect the machines. Raises LabError."""
    hosts = f"mount --bind {place.conf.parent}/hosts /etc/hosts"
    _shell(
        head,
        f"hostname head; {hosts}; ip link set lo up; ip link add br0 type bridge; "
        f"ip addr add {shape.address('head')}/24 dev br0; ip link set br0 up",
    )
    for node in nodes:
        cable = _cable(node.name)
        # run outside the machines, where all process ids are visible
        _outside(
            "ip",
            "link",
            "add",
            cable,
            "netns",
            head.network,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            node.network,
        )
        _shell(head, f"ip link set {cable} master br0 up")
        _shell(
            node,
            f"hostname {node.name}; {hosts}; ip link set lo up; "
            f"ip addr add {shape.address(node.name)}/24 dev eth0; ip link set eth0 up",
        )


def unplug(head: Handle, node: str) -> None:
    _shell(head, f"ip link set {_cable(node)} down")


def plug_in(head: Handle, node: str) -> None:
    _shell(head, f"ip link set {_cable(node)} up")


def _cable(node: str) -> str:
    return f"v{node}"


def _shell(machine: Handle, script: str) -> None:
    _outside(*machine.inside("sh", "-ec", script))


def _outside(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")


# ---- cluster


_LONGEST = 60
"""Maximum characters of the folder path, because socket paths have a maximum length."""
_BROOM = 'cat; flock "$1" rm -rf "$2"'


class Cluster(Commands):
    """A real Slurm as a context manager. Raises LabError if it does not start."""

    def __init__(self, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.place = Place(root=_folder(), port=free_ports(texts.ports_needed(self.shape)))
        self.machines: dict[str, Handle] = {}
        super().__init__(self.place, inside=self.on_head)

    def __enter__(self) -> Cluster:
        self.place.make()
        self._broom = _broom(self.place)
        try:
            self._write()
            self._start()
        except BaseException as error:
            error.add_note(self.tails())
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.machines.values():
            machine.end()
        for machine in self.machines.values():
            machine.gone()
        self._broom.communicate()

    # ---- machines and daemons; `where` is a node (n1, ...), or slurmctld, munged, slurmdbd, mariadb

    def on_head(self, *command: str) -> list[str]:
        return self.machines["head"].inside(*command)

    def crash(self, node: str) -> None:
        self.machines[node].crash()

    def kill(self, where: str) -> None:
        machine, daemon = self._find(where)
        machine.kill(daemon)

    def have_jobs_written(self) -> None:
        file, asked = self.place.root / "state" / "job_state", time.time()
        for job in self.queue():
            self.run("scontrol", "update", f"JobId={job[0]}", "Comment=written")
        until(lambda: file.exists() and file.stat().st_mtime > asked, what="the jobs on disk")

    def start(self, where: str) -> None:
        machine, daemon = self._find(where)
        machine.start(daemon)

    def freeze(self, where: str) -> None:
        machine, daemon = self._find(where)
        machine.freeze(daemon)

    def thaw(self, where: str) -> None:
        machine, daemon = self._find(where)
        machine.thaw(daemon)

    def cut(self, node: str) -> None:
        unplug(self.machines["head"], node)

    def heal(self, node: str) -> None:
        plug_in(self.machines["head"], node)

    def _find(self, where: str) -> tuple[Handle, str]:
        if where in self.shape.nodes:
            return self.machines[where], "slurmd"
        return self.machines["head"], where

    # ---- order between tests

    def clear(self, *, limit_s: float = PATIENCE_S) -> None:
        """Restore the cluster: daemons up, no jobs, every node idle. Raises LabError."""
        for machine in self.machines.values():
            for daemon in machine.daemons:
                if machine.runs(daemon):
                    machine.thaw(daemon)
                machine.start(daemon)
        until(lambda: self.ask("scontrol", "ping").returncode == 0, limit_s=limit_s, what="slurmctld")
        while jobs := [line[0] for line in self.queue()]:
            self.cancel(*jobs)
            self._wait_for_end(set(jobs), limit_s=limit_s)
        self._all_idle(limit_s=limit_s)

    def _wait_for_end(self, jobs: set[str], *, limit_s: float) -> None:
        until(lambda: not jobs & {line[0] for line in self.queue()}, limit_s=limit_s, what="jobs to end")

    def _all_idle(self, *, limit_s: float) -> None:
        def idle() -> bool:
            states = self.nodes() if self.ask("scontrol", "ping").returncode == 0 else {}
            sick = [node for node, state in states.items() if state.rstrip("*") in ("down", "drained", "draining")]
            if sick:
                self.ask("scontrol", "update", f"NodeName={','.join(sick)}", "State=RESUME")
            return set(states) == set(self.shape.nodes) and set(states.values()) == {"idle"}

        until(idle, limit_s=limit_s, what="every node idle")

    # ---- the beginning

    def _write(self) -> None:
        for index in range(8):
            (self.place.root / "dev" / f"nvidia{index}").symlink_to(os.devnull)
        for node in self.shape.nodes:
            (self.place.run / f"spool-{node}").mkdir()
        folder = self.place.conf.parent
        _private(folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        for name, text in texts.files(self.shape, self.place).items():
            (_private(folder / name) if name == "slurmdbd.conf" else folder / name).write_text(text)

    def _start(self) -> None:
        for name in ("head", *self.shape.nodes):
            commands = texts.commands(self.shape, self.place, name)
            self.machines[name] = Handle(name, commands, place=self.place, alone=self.shape.namespaces)
        for machine in self.machines.values():
            machine.ready()
        head, nodes = self.machines["head"], [self.machines[name] for name in self.shape.nodes]
        if self.shape.namespaces:
            set_up_bridge(head, nodes, shape=self.shape, place=self.place)
        head.start("munged")
        self._up(self.place.munge.is_socket, daemon="munged")
        if self.shape.accounting:
            self._start_accounting(head)
        head.start("slurmctld")
        for node in nodes:
            node.start("slurmd")
        self._all_idle(limit_s=PATIENCE_S)

    def _up(self, true: Callable[[], bool], *, daemon: str) -> None:
        """Wait for a condition while the daemon runs."""

        def up_or_gone() -> bool:
            return true() or not self.machines["head"].runs(daemon)

        until(up_or_gone, limit_s=PATIENCE_S, what=daemon)
        if not true():
            raise LabError(f"{daemon} has ended")

    def _start_accounting(self, head: Handle) -> None:
        (self.place.root / "db").mkdir()  # mariadbd runs without grant tables, so the folder may be empty
        head.start("mariadb")
        self._up((self.place.run / "db.sock").is_socket, daemon="mariadb")
        head.start("slurmdbd")
        self._up(lambda: self.ask("sacctmgr", "-n", "show", "cluster").returncode == 0, daemon="slurmdbd")
        self.run("sacctmgr", "-i", "add", "cluster", "lab")

    def tails(self) -> str:
        found = []
        for log in sorted(path for path in self.place.logs.rglob("*") if path.is_file()):
            if lines := log.read_text(errors="replace").splitlines()[-8:]:
                found += [f"== {log.relative_to(self.place.logs)}", *lines]
        return "\n".join(found)


def _folder() -> Path:
    """Return a new folder whose path fits sockets and slurm.conf."""
    base = tempfile.gettempdir()
    if len(base) > _LONGEST - 20 or set(base) & set(" \t#=,\"'\\%[]"):
        base = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="slurm-lab-", dir=base)).resolve()
    folder.chmod(0o755)  # munged requires a socket that every user can reach
    return folder


def _private(path: Path) -> Path:
    path.touch(mode=0o600)
    return path


def _broom(place: Place) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", _BROOM, "broom", str(place.lock), str(place.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",
        env=environment(place),
        start_new_session=True,
    )
