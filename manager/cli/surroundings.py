"""Find the batch system, queues, networks and shared file systems of this host."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from stoker.contexts.folders import state_folder
from stoker.manager.factory.batch import BatchSystemError
from stoker.manager.factory.commands import CommandResult, CommandRunner
from stoker.manager.live import interfaces
from stoker.site import ProviderKind

# ---- Slurm


PARTITIONS = ("scontrol", "show", "partition", "--oneliner")
SINFO = ("sinfo", "-h", "-o", "%P|%a|%l|%D|%c|%m|%G|%p|%M")
_MIB = 1024 * 1024
_USABLE_MEMORY_SHARE = 0.9
"""Share of a node's memory that a pilot requests; the system needs the rest."""
_TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_GRES = re.compile(r"gpu(?::(?P<type>[^:(]+))?:(?P<count>\d+)")


class Gpus(msgspec.Struct, frozen=True):
    """`count` GPUs on each of `nodes` nodes. The type may be empty."""

    type: str
    count: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.type}:{self.count} x {self.nodes}".removeprefix(":")


class Partition(msgspec.Struct, frozen=True):
    """A Slurm partition; 0 means unlimited or unknown. `cores`, `memory_bytes`: size of the smallest node. `gpu_cores`,
    `gpu_memory_bytes`: Slurm's defaults per GPU. `most_memory_bytes`, `core_memory_bytes`: maximum memory per node and
    per core.
    """

    name: str
    default: bool = False
    limit_s: float = 0.0
    nodes: int = 0
    cores: int = 0
    memory_bytes: int = 0
    gpus: tuple[Gpus, ...] = ()
    tier: int = 0
    preempt: str = ""
    gpu_cores: int = 0
    gpu_memory_bytes: int = 0
    most_memory_bytes: int = 0
    core_memory_bytes: int = 0

    @property
    def pilot_share(self) -> tuple[int, int]:
        """Cores and bytes of memory of a pilot: one GPU's part of the smallest node, or the whole node without GPUs."""
        gpus = max((each.count for each in self.gpus), default=1)
        cores = max(1, self.gpu_cores or self.cores // gpus)
        memory = self.gpu_memory_bytes or int(_USABLE_MEMORY_SHARE * self.memory_bytes) // gpus
        limits = [self.most_memory_bytes, self.core_memory_bytes * cores]
        return cores, min([memory, *(limit for limit in limits if limit)])

    @property
    def gpu_count(self) -> int:
        return sum(each.count * each.nodes for each in self.gpus)


class Slurm(msgspec.Struct, frozen=True):
    """A Slurm cluster. `preempts`: jobs of one partition can preempt others. `trouble`: the first error."""

    version: str = ""
    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] = ()
    preempts: bool = False
    trouble: str = ""

    def is_preemptible(self, partition: Partition) -> bool:
        above = any(other.tier > partition.tier for other in self.partitions)
        return self.preempts and above and partition.preempt not in ("", "OFF")


def query_slurm(run: Callable[[Sequence[str]], CommandResult]) -> Slurm:
    try:
        version = (run(("sinfo", "--version")).out.split() or [""])[-1]  # "slurm 23.02.7", "slurm-wlm 22.05.8"
        said = run(SINFO)
        if said.code:
            return Slurm(version, trouble=said.failure_reason)
        shown = run(PARTITIONS)
        config = run(("scontrol", "show", "config"))
        associations = run(("sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account"))
    except BatchSystemError as trouble:
        return Slurm(trouble=str(trouble))
    accounts = associations.out.split() if not associations.code else []
    preempts = re.search(r"^PreemptType\s*=\s*(\S+)", config.out, re.MULTILINE)
    return Slurm(
        version=version,
        partitions=tuple(read_partitions(said.out, "" if shown.code else shown.out)),
        accounts=tuple(dict.fromkeys(accounts)),
        preempts=preempts is not None and preempts[1] not in ("preempt/none", "(null)"),
    )


def read_partitions(text: str, shown: str) -> list[Partition]:
    """Return the partitions that are up, from the output of `sinfo` and of `scontrol show partition --oneliner`."""
    rows = [line.strip().split("|") for line in text.splitlines()]
    known = [row for row in rows if len(row) == 9 and row[1] == "up"]
    return [
        _partition(title, [row for row in known if row[0] == title], shown)
        for title in dict.fromkeys(row[0] for row in known)
    ]


def _partition(title: str, rows: Sequence[Sequence[str]], shown: str) -> Partition:
    name = title.rstrip("*")
    grants = next((line for line in shown.splitlines() if f"PartitionName={name} " in f"{line} "), "")
    granted = {key: _number(value) for key, value in re.findall(r"(\w+)=(\d+)\b", grants)}
    _, _, limits, nodes, cores, memories, gres, tiers, preempts = zip(*rows, strict=True)
    return Partition(
        name=name,
        default=title.endswith("*"),
        limit_s=parse_time_limit(limits[0]),
        nodes=sum(map(_number, nodes)),
        cores=min(map(_number, cores)),
        memory_bytes=min(map(_number, memories)) * _MIB,
        gpus=tuple(
            Gpus(*gpu, _number(count)) for text, count in zip(gres, nodes, strict=True) for gpu in read_gres(text)
        ),
        tier=_number(tiers[0]),
        preempt=preempts[0].upper(),
        gpu_cores=granted.get("DefCpuPerGPU", 0),
        gpu_memory_bytes=granted.get("DefMemPerGPU", 0) * _MIB,
        most_memory_bytes=granted.get("MaxMemPerNode", 0) * _MIB,
        core_memory_bytes=granted.get("MaxMemPerCPU", 0) * _MIB,
    )


def read_gres(text: str) -> list[tuple[str, int]]:
    """Return the types and numbers of GPUs in a text such as `gpu:a10:2(S:0-1),gpu:titanx:1`."""
    return [(found["type"] or "", int(found["count"])) for found in _GRES.finditer(text)]


def parse_time_limit(text: str) -> float:
    """Return the seconds of a time limit, such as `1-00:00:00`, `4:00:00` or `30`; 0 without a limit."""
    found = _TIME_LIMIT.fullmatch(text.strip())
    if not found:
        return 0.0
    parts = [int(part) for part in found["rest"].split(":")]
    # days-hours[:minutes[:seconds]], hours:minutes:seconds, or minutes[:seconds]
    parts = parts if found["days"] is not None or len(parts) == 3 else [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


# ---- the host


COMMAND_LIMIT_S = 15.0
_SUBMIT_COMMANDS = (
    (ProviderKind.SLURM, "sbatch"), (ProviderKind.CONDOR, "condor_submit"), (ProviderKind.LSF, "bsub"),
    (ProviderKind.GRID_ENGINE, "qconf"), (ProviderKind.PBS, "qsub"), (ProviderKind.KUBERNETES, "kubectl"),
)  # fmt: skip
"""Commands that show which batch system a host has. Grid Engine is found by `qconf`, because PBS has `qsub` too."""
_KUBERNETES_CONTEXT_COMMAND = ("kubectl", "config", "current-context")
"""Fails if `kubectl` is not connected to a cluster."""
IMAGE_PLACEHOLDER = "IMAGE"
"""Placeholder of `stoker init` for the container image."""
_QUEUE_COMMANDS: Mapping[ProviderKind, tuple[str, ...]] = {
    ProviderKind.PBS: ("qstat", "-Q"),
    ProviderKind.LSF: ("bqueues", "-w"),
    ProviderKind.GRID_ENGINE: ("qconf", "-sql"),
}
FAST_NETWORKS = ("ib", "hsn", "opa", "mlx", "ipogif")
_NETWORK_FILES = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "panfs", "orangefs", "glusterfs", "fuse.", "smb", "cifs",
)  # fmt: skip
_SCRATCH_VARIABLES = ("SCRATCH", "SCRATCHDIR", "LOCAL_SCRATCH", "WORK")


class ScratchPlace(msgspec.Struct, frozen=True):
    path: str
    free_bytes: int
    shared: bool


class CondorNode(msgspec.Struct, frozen=True):
    """A machine of the HTCondor pool. If its `user_domain` differs from this host's, it runs jobs as another user."""

    cores: int
    memory_bytes: int
    gpus: int = 0
    user_domain: str = ""


class HostFacts(msgspec.Struct, frozen=True):
    """Facts about this host. `home_shared`: the state folder is on a shared file system."""

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
    nodes: tuple[CondorNode, ...] = ()
    user_domain: str = ""


def inspect_host() -> HostFacts:
    run = CommandRunner(limit_s=COMMAND_LIMIT_S, folder=Path(tempfile.gettempdir())).run
    found = [(kind, path) for kind, name in _SUBMIT_COMMANDS if (path := shutil.which(name))]
    found = [
        each
        for each in found
        if each[0] is not ProviderKind.KUBERNETES or _output_or_empty(run, _KUBERNETES_CONTEXT_COMMAND)
    ]
    if any(kind is ProviderKind.GRID_ENGINE for kind, _ in found):
        found = [each for each in found if each[0] is not ProviderKind.PBS]
    slurm = query_slurm(run) if found and found[0][0] is ProviderKind.SLURM else None
    if slurm is not None and slurm.trouble and len(found) > 1:  # Slurm does not answer, so use the next system
        found, slurm = [*found[1:], found[0]], None
    kind, command = found[0] if found else (ProviderKind.LOCAL, "")
    is_condor = kind is ProviderKind.CONDOR
    return HostFacts(
        host=os.uname().nodename,
        user=getpass.getuser(),
        kind=kind,
        command=command,
        others=tuple(other for other, _ in found[1:]),
        slurm=slurm,
        queues=tuple(read_queues(_output_or_empty(run, _QUEUE_COMMANDS[kind]), kind))
        if kind in _QUEUE_COMMANDS
        else (),
        nodes=tuple(parse_condor_nodes(_output_or_empty(run, _CONDOR_NODES_COMMAND))) if is_condor else (),
        user_domain=_output_or_empty(run, ("condor_config_val", "UID_DOMAIN")).strip() if is_condor else "",
        networks=interfaces.list_network_addresses(),
        reached_at=interfaces.resolve_interface(interfaces.AUTO),
        home=str(state_folder()),
        home_shared=is_on_shared_file_system(state_folder()),
        scratch=tuple(find_scratch_places()),
    )


def is_on_shared_file_system(path: Path) -> bool:
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    mounted = next((mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts), "")
    return mounted.startswith(_NETWORK_FILES)


def find_scratch_places() -> list[ScratchPlace]:
    paths = [os.environ[name] for name in _SCRATCH_VARIABLES if os.environ.get(name)]
    paths += [f"/scratch/{getpass.getuser()}", "/scratch", f"/local/{getpass.getuser()}"]
    usable = [Path(path) for path in dict.fromkeys(paths) if os.access(path, os.W_OK | os.X_OK)]
    return [ScratchPlace(str(path), shutil.disk_usage(path).free, is_on_shared_file_system(path)) for path in usable]


def read_queues(text: str, kind: ProviderKind) -> list[str]:
    """Return the open queues in the output of `qstat -Q`, `bqueues -w` or `qconf -sql`."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if kind is ProviderKind.GRID_ENGINE:
        return [words[0] for words in lines]
    if kind is ProviderKind.LSF:  # header: QUEUE_NAME PRIO STATUS ...
        return [words[0] for words in lines[1:] if len(words) > 2 and words[2].startswith("Open")]
    return [words[0] for words in lines if words[3:5] == ["yes", "yes"]]  # header: Queue Max Tot Ena Str ...


def parse_condor_nodes(text: str) -> list[CondorNode]:
    """Return the machines in the output of `condor_status -af`: cores, MiB of memory, GPUs, user domain."""
    found = []
    for line in text.splitlines():
        words = [word if word not in ("undefined", "error") else "" for word in line.split()]
        amounts = [int(word) if word.isdecimal() else 0 for word in words[:3]]
        if len(amounts) == 3 and amounts[0] and amounts[1]:
            found.append(CondorNode(amounts[0], amounts[1] * 1024**2, amounts[2], "".join(words[3:])))
    return found


_CONDOR_NODES_COMMAND = (
    "condor_status", "-constraint", 'SlotType =!= "Dynamic"',
    "-af", "TotalSlotCpus", "TotalSlotMemory", "TotalSlotGPUs", "UidDomain",
)  # fmt: skip
"""Lists the machines of the pool. Without `-startd`, because HTCondor 25 would then list daemons instead of slots."""


def _output_or_empty(run: Callable[[Sequence[str]], CommandResult], command: Sequence[str]) -> str:
    try:
        said = run(command)
    except BatchSystemError:
        return ""
    return "" if said.code else said.out
