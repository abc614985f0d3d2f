"""What `stoker init` and `doctor` find around this host: its batch system, networks, and where files are seen."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from stoker.contexts.state import state_folder
from stoker.manager.cli import slurm_facts
from stoker.manager.cli.slurm_facts import Slurm
from stoker.manager.factory.batch import BatchTrouble
from stoker.manager.factory.commands import CommandResult, CommandRunner
from stoker.manager.live import interfaces
from stoker.site import ProviderKind

COMMAND_LIMIT_S = 15.0
_SUBMITS = (
    (ProviderKind.SLURM, "sbatch"),
    (ProviderKind.CONDOR, "condor_submit"),
    (ProviderKind.LSF, "bsub"),
    (ProviderKind.GRID_ENGINE, "qconf"),
    (ProviderKind.PBS, "qsub"),
    (ProviderKind.KUBERNETES, "kubectl"),
)
"""What to look for on PATH, best first: Grid Engine and PBS both have `qsub`, and one of them `qconf`."""
_QUEUES: Mapping[ProviderKind, tuple[str, ...]] = {
    ProviderKind.PBS: ("qstat", "-Q"),
    ProviderKind.LSF: ("bqueues", "-w"),
    ProviderKind.GRID_ENGINE: ("qconf", "-sql"),
}
_FAST = ("ib", "hsn", "opa", "mlx", "ipogif")
"""How networks are called that are faster than the one of the host's name."""
_NETWORK_FILES = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "panfs",
    "orangefs",
    "glusterfs",
    "fuse.",
    "smb",
    "cifs",
)
"""Beginnings of the names of file systems that several hosts see."""
_SCRATCH = ("SCRATCH", "SCRATCHDIR", "LOCAL_SCRATCH", "WORK")


class ScratchPlace(msgspec.Struct, frozen=True):
    """A place for big files: what names it, and how much room it has."""

    path: str
    free_bytes: int
    shared: bool


class Node(msgspec.Struct, frozen=True):
    """A machine of HTCondor's pool."""

    cores: int
    memory_bytes: int
    gpus: int = 0


class HostFacts(msgspec.Struct, frozen=True):
    """What was found. `home_shared`: whether the state folder lies on a file system that other hosts see, too."""

    host: str
    user: str
    kind: ProviderKind = ProviderKind.LOCAL
    command: str = ""
    others: tuple[ProviderKind, ...] = ()
    slurm: Slurm | None = None
    queues: tuple[str, ...] = ()
    networks: dict[str, str] = msgspec.field(default_factory=dict)
    reached_at: str = ""
    home: str = ""
    home_shared: bool = False
    scratch: tuple[ScratchPlace, ...] = ()
    nodes: tuple[Node, ...] = ()

    @property
    def fast_network(self) -> str:
        """A network that is faster than the one of this host's name; empty if there is none."""
        return next((name for name in self.networks if name.startswith(_FAST)), "")


def inspect_host() -> HostFacts:
    """Look around. Nothing is submitted; no command may take longer than COMMAND_LIMIT_S."""
    found = [(kind, path) for kind, name in _SUBMITS if (path := shutil.which(name))]
    if any(kind is ProviderKind.GRID_ENGINE for kind, _ in found):
        found = [each for each in found if each[0] is not ProviderKind.PBS]
    kind, command = found[0] if found else (ProviderKind.LOCAL, "")
    run = CommandRunner(limit_s=COMMAND_LIMIT_S, folder=Path(tempfile.gettempdir())).run
    slurm = slurm_facts.ask(run) if kind is ProviderKind.SLURM else None
    if slurm is not None and slurm.trouble and len(found) > 1:  # installed, not configured: another one may work
        found = [*found[1:], found[0]]
        kind, command = found[0]
        slurm = None
    return HostFacts(
        host=os.uname().nodename,
        user=getpass.getuser(),
        kind=kind,
        command=command,
        others=tuple(other for other, _ in found[1:]),
        slurm=slurm,
        queues=tuple(_ask_queues(run, kind)),
        nodes=tuple(_ask_nodes(run)) if kind is ProviderKind.CONDOR else (),
        networks=interfaces.networks(),
        reached_at=interfaces.resolve(interfaces.AUTO),
        home=str(state_folder()),
        home_shared=is_shared(state_folder()),
        scratch=tuple(scratch_places()),
    )


def is_shared(path: Path) -> bool:
    """Whether a folder (it need not exist yet) lies on a file system that other hosts see, by the name of its type."""
    return file_system(path, {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}).startswith(
        _NETWORK_FILES
    )


def file_system(path: Path, mounts: Mapping[str, str]) -> str:
    """The type of the file system that a folder lies on, from what is mounted where."""
    for place in (path, *path.parents):
        if str(place) in mounts:
            return mounts[str(place)]
    return ""


def scratch_places() -> list[ScratchPlace]:
    """Places for big files that sites commonly have: those that the environment names, and /scratch of this user."""
    paths = [os.environ[name] for name in _SCRATCH if os.environ.get(name)]
    paths += [f"/scratch/{getpass.getuser()}", "/scratch", f"/local/{getpass.getuser()}"]
    usable = [Path(path) for path in dict.fromkeys(paths) if os.access(path, os.W_OK | os.X_OK)]
    return [ScratchPlace(str(path), shutil.disk_usage(path).free, is_shared(path)) for path in usable]


def read_queues(text: str, kind: ProviderKind) -> list[str]:
    """Names of queues, from `qstat -Q`, `bqueues -w` or `qconf -sql`."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if kind is ProviderKind.GRID_ENGINE:
        return [words[0] for words in lines]
    if kind is ProviderKind.LSF:  # QUEUE_NAME PRIO STATUS ...
        return [words[0] for words in lines[1:] if len(words) > 2 and words[2].startswith("Open")]
    # Queue Max Tot Ena Str ..., and a line of dashes
    return [words[0] for words in lines if len(words) > 4 and words[3] == "yes" and words[4] == "yes"]


def read_nodes(text: str) -> list[Node]:
    """Machines, from `condor_status -af` of cores, MiB of memory and GPUs (`undefined` where there is none)."""
    found = []
    for line in text.splitlines():
        words = [word if word.isdecimal() else "0" for word in line.split()]
        if len(words) == 3 and int(words[0]) and int(words[1]):
            found.append(Node(int(words[0]), int(words[1]) * 1024**2, int(words[2])))
    return found


_NODES = (
    "condor_status", "-startd", "-constraint", 'SlotType =!= "Dynamic"',
    "-af", "TotalSlotCpus", "TotalSlotMemory", "TotalSlotGPUs",
)  # fmt: skip


def _ask_nodes(run: Callable[[Sequence[str]], CommandResult]) -> list[Node]:
    try:
        said = run(_NODES)
    except BatchTrouble:
        return []
    return [] if said.code else read_nodes(said.out)


def _ask_queues(run: Callable[[Sequence[str]], CommandResult], kind: ProviderKind) -> list[str]:
    if kind not in _QUEUES:
        return []
    try:
        said = run(_QUEUES[kind])
    except BatchTrouble:
        return []
    return [] if said.code else read_queues(said.out, kind)
