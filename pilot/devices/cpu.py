"""CPU devices: each is a share of the pilot's cores and memory. `PilotDevice` describes any device.

The smallest limit applies: affinity mask, cgroup quota, or the grant of Slurm or HTCondor. A pilot with GPUs may offer
spare cores as CPU devices (`gpu+cpu:1`). Each GPU keeps the first cores of its share, and the agent runs on the cores
that GPUs keep.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import ConfigError
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFacts

# ---- a device


class PilotDevice(msgspec.Struct, frozen=True):
    facts: DeviceFacts
    cores: tuple[int, ...] = ()
    uuid: str = ""  # UUID of a GPU or MIG part; empty for CPU devices

    def with_facts(self, **facts: Any) -> PilotDevice:
        return msgspec.structs.replace(self, facts=msgspec.structs.replace(self.facts, **facts))

    def with_cores(self, cores: tuple[int, ...]) -> PilotDevice:
        return msgspec.structs.replace(self.with_facts(cores=max(1, len(cores))), cores=cores)


class GrantedDevices(msgspec.Struct, frozen=True):
    """The devices to offer. `troubles`: faults of other granted devices. `lacks`: why no device can be used."""

    offered: tuple[PilotDevice, ...] = ()
    troubles: tuple[str, ...] = ()
    lacks: str = ""

    def with_fault(self, why: str) -> GrantedDevices:
        return GrantedDevices(tuple(each.with_facts(fault=why) for each in self.offered), self.troubles, lacks=why)


# ---- CPU devices

USABLE_MEMORY_SHARE = 0.9  # share of memory for CPU devices; the agent and the system use the remainder


def find_cpu_devices(count: int = 0) -> tuple[PilotDevice, ...]:
    return make_cpu_devices(find_usable_cores(), count, memory_bytes=int(USABLE_MEMORY_SHARE * usable_memory_bytes()))


def make_cpu_devices(
    usable_cores: tuple[int, ...], count: int = 0, *, memory_bytes: int, spare: bool = False
) -> tuple[PilotDevice, ...]:
    """Divide cores and memory equally among `count` CPU devices (0 = one device per core)."""
    count = count or len(usable_cores)
    return tuple(
        PilotDevice(
            facts=DeviceFacts(
                device=DeviceId(f"cpu:{index}"),
                kind="cpu",
                memory_bytes=memory_bytes // count,
                cores=max(1, len(part)),
                spare=spare,
            ),
            cores=part,
        )
        for index, part in enumerate(divide_cores(usable_cores, count))
    )


def divide_cores(cores: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Divide cores into even, contiguous groups. With more parts than cores, several parts share a core."""
    if parts >= len(cores):
        return [(cores[index % len(cores)],) for index in range(parts)]
    size, more = divmod(len(cores), parts)
    starts = [index * size + min(index, more) for index in range(parts + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(starts)]


def find_usable_cores(environ: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> tuple[int, ...]:
    """Return the cores of this process. If the batch system does not bind jobs to cores, HTCondor's slot number or
    Slurm's job id selects the cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    limits = [_cgroup_cpu_quota(root), _slurm_number(environ, "SLURM_CPUS_ON_NODE"), _condor_number(environ, "Cpus")]
    count = max(1, int(min([len(allowed), *(limit for limit in limits if limit)])))
    place = environ.get("_CONDOR_SLOT", "") or environ.get("SLURM_JOB_ID", "")
    number = re.search(r"([0-9]+)$", place) if count < len(allowed) else None
    first = (int(number[1]) - 1) * count if number else 0
    return tuple(sorted(allowed[(first + index) % len(allowed)] for index in range(count)))


def usable_memory_bytes(environ: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> int:
    limits = [read_value(root / "proc/meminfo", "MemTotal:") * 1024]
    for folder in cgroup_folders(root, "memory"):
        limits += [read_number_from_file(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    per_core = _slurm_number(environ, "SLURM_MEM_PER_CPU") * _slurm_number(environ, "SLURM_CPUS_ON_NODE")
    per_gpu = _slurm_number(environ, "SLURM_MEM_PER_GPU") * _slurm_number(environ, "SLURM_GPUS_ON_NODE")
    # Slurm and HTCondor state memory in MiB.
    granted = (_slurm_number(environ, "SLURM_MEM_PER_NODE"), per_core, per_gpu, _condor_number(environ, "Memory"))
    return min(limit for limit in (*limits, *(int(mib) * 1024**2 for mib in granted)) if limit)


def _slurm_number(environ: Mapping[str, str], name: str) -> float:
    text = environ.get(name, "")
    if "SLURM_JOB_ID" not in environ or not text:
        return 0
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment is not a number", key=name)
    return int(text)


def _condor_number(environ: Mapping[str, str], name: str) -> float:
    try:
        ad = Path(environ["_CONDOR_MACHINE_AD"]).read_text(errors="replace")
    except (KeyError, OSError):
        return 0
    found = re.search(rf"^{name} = ([0-9]+)", ad, re.MULTILINE)
    return int(found[1]) if found else 0


def _cgroup_cpu_quota(root: Path) -> float:
    found = []
    for folder in cgroup_folders(root, "cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text()
        except OSError:
            continue
        if quota not in ("max", "-1"):
            found.append(max(1.0, int(quota) / int(period)))
    return min(found, default=0.0)


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders (version 1 or 2) of this process for a controller, and the folders above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controller if controllers else root / "sys/fs/cgroup"
        inner = base / path.lstrip("/")
        yield from (place for place in (inner, *inner.parents) if place.is_relative_to(base) and place.is_dir())


def read_value(path: Path, name: str, *, none: int = 0) -> int:
    """Return the number that follows `name` in a file of /proc or a cgroup, or `none` if the name is missing."""
    with suppress(OSError), path.open() as file:
        for line in file:
            words = line.split()
            if words[:1] == [name] and words[1:2] and words[1].isdecimal():
                return int(words[1])
    return none


def read_number_from_file(path: Path) -> int:
    """Return the number in a file; 0 if the file is missing or contains `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


# ---- spare cores next to GPUs

_MOST_KEPT = 0.5  # largest share of host memory that CPU devices leave to contexts on GPUs


def add_spare_cpu_devices(
    gpus: tuple[PilotDevice, ...], *, count: int, gpu_cores: int
) -> tuple[tuple[PilotDevice, ...], str]:
    """Return GPUs with `gpu_cores` cores each, then `count` CPU devices on the other cores (0 = one per core)."""
    mine = find_usable_cores()
    parts = divide_cores(mine, len(gpus))
    if len(mine) <= gpu_cores * len(gpus):
        why = (
            f"no core is left for CPU devices: the pilot has {len(mine)} cores and keeps {gpu_cores} for each of"
            f" {len(gpus)} GPU{'s' * (len(gpus) != 1)}; request more cores ([provider] cores), or lower [pilot]"
            " gpu_cores"
        )
        return tuple(gpu.with_cores(part) for gpu, part in zip(gpus, parts, strict=True)), why
    kept = tuple(gpu.with_cores(part[:gpu_cores]) for gpu, part in zip(gpus, parts, strict=True))
    left = tuple(core for part in parts for core in part[gpu_cores:])
    memory = int(USABLE_MEMORY_SHARE * usable_memory_bytes())
    for_gpus = min(sum(gpu.facts.memory_bytes for gpu in gpus), int(_MOST_KEPT * memory))
    return kept + make_cpu_devices(left, count, memory_bytes=memory - for_gpus, spare=True), ""


_SLEEPER_SHARE = 0.5  # sleeping GPU contexts may use this share of the host memory that no CPU device gets


def sleeper_bytes(devices: tuple[PilotDevice, ...]) -> int:
    """Return the bytes of host memory that sleeping contexts of GPUs may use; 0 without a GPU."""
    offered = sum(device.facts.memory_bytes for device in devices if device.facts.on_host)
    if all(device.facts.on_host for device in devices):
        return 0
    return int(_SLEEPER_SHARE * max(0, int(USABLE_MEMORY_SHARE * usable_memory_bytes()) - offered))


def cores_outside_cpu_devices(devices: tuple[PilotDevice, ...]) -> frozenset[int]:
    """Return the cores that the GPUs keep; empty if the pilot offers no spare cores as CPU devices."""
    if not any(device.facts.spare for device in devices):
        return frozenset()
    return frozenset(core for device in devices if not device.facts.spare for core in device.cores)
