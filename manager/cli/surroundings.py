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

from stoker.contexts.folders import state_folder
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
    """A machine of HTCondor's pool. `user_domain`: its jobs run as their owners, if these come from a host of the same
    domain; else as slot users of its own, or as nobody."""

    cores: int
    memory_bytes: int
    gpus: int = 0
    user_domain: str = ""


class HostFacts(msgspec.Struct, frozen=True):
    """What was found. `home_shared`: whether the state folder lies on a file system that other hosts see, too.
    `user_domain`: the UID_DOMAIN of this host, where HTCondor is here."""

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
    user_domain: str = ""

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
        nodes=tuple(read_nodes(_said(run, _NODES))) if kind is ProviderKind.CONDOR else (),
        user_domain=_said(run, _DOMAIN).strip() if kind is ProviderKind.CONDOR else "",
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
    """Machines, from `condor_status -af` of cores, MiB of memory, GPUs and the domain of users (`undefined` where there
    is none)."""
    found = []
    for line in text.splitlines():
        words = [word if word not in ("undefined", "error") else "" for word in line.split()]
        amounts = [int(word) if word.isdecimal() else 0 for word in words[:3]]
        if len(amounts) == 3 and amounts[0] and amounts[1]:
            found.append(Node(amounts[0], amounts[1] * 1024**2, amounts[2], "".join(words[3:])))
    return found


_NODES = (
    "condor_status", "-constraint", 'SlotType =!= "Dynamic"',
    "-af", "TotalSlotCpus", "TotalSlotMemory", "TotalSlotGPUs", "UidDomain",
)  # fmt: skip
"""Of slots: with `-startd`, HTCondor 25 shows daemons, which have none of these."""
_DOMAIN = ("condor_config_val", "UID_DOMAIN")


def _ask_queues(run: Callable[[Sequence[str]], CommandResult], kind: ProviderKind) -> list[str]:
    return read_queues(_said(run, _QUEUES[kind]), kind) if kind in _QUEUES else []


def _said(run: Callable[[Sequence[str]], CommandResult], command: Sequence[str]) -> str:
    """What a command prints; nothing where it does not work."""
    try:
        said = run(command)
    except BatchTrouble:
        return ""
    return "" if said.code else said.out
