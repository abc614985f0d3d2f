"""Finding devices: what was granted, and nothing more."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.pilot.devices import cpu, find_devices, gpu, visible


class StandIn:
    """What this project asks of `pynvml`, over a machine that a test describes: `{uuid: [MIG uuids]}`."""

    class NVMLError(Exception):
        pass

    def __init__(self, machine: dict[str, list[str]] | None) -> None:
        self.machine = machine

    def nvmlInit(self) -> None:
        if self.machine is None:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.machine or {})

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self.machine or {})[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (self.machine or {}):
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA A10" if handle.startswith("GPU") else b"NVIDIA A100 MIG 1g.5gb"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=24 * 10**9)

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if not (self.machine or {}).get(handle):
            raise self.NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        parts = (self.machine or {})[handle]
        if index >= len(parts):
            raise self.NVMLError("Not Found")
        return parts[index]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=5), SimpleNamespace(pid=8, usedGpuMemory=None)]


FOUR = {f"GPU-{n}a": [] for n in range(4)}


@pytest.mark.parametrize(
    ("granted", "expected"),
    [
        (None, ["GPU-0a", "GPU-1a", "GPU-2a", "GPU-3a"]),
        ("2", ["GPU-2a"]),
        ("3,1", ["GPU-3a", "GPU-1a"]),
        (" 1 , 2", ["GPU-1a", "GPU-2a"]),
        ("GPU-2", ["GPU-2a"]),
        ("1,9,2", ["GPU-1a"]),  # as CUDA: the list ends where it names nothing
        ("1,1", ["GPU-1a"]),
        ("NoDevFiles", []),
        ("-1", []),
        ("", []),
    ],
)
def test_granted_gpus(granted: str | None, expected: list[str]) -> None:
    environ = {} if granted is None else {"CUDA_VISIBLE_DEVICES": granted}
    found, why = gpu.find(environ, nvml=StandIn(FOUR))
    assert [device.uuid for device in found] == expected
    assert [device.facts.device for device in found] == [f"cuda:{n}" for n in range(len(expected))]
    assert bool(why) == (not expected)
    assert visible(found) == {"CUDA_VISIBLE_DEVICES": ",".join(expected)}


@pytest.mark.parametrize(
    ("granted", "expected"),
    [
        (None, ["MIG-a", "MIG-b", "GPU-b"]),
        ("MIG-b", ["MIG-b"]),
        ("0", ["MIG-a"]),
        ("GPU-b,MIG-a", ["GPU-b", "MIG-a"]),
    ],
)
def test_parts_of_a_gpu(granted: str | None, expected: list[str]) -> None:
    environ = {} if granted is None else {"CUDA_VISIBLE_DEVICES": granted}
    found, _ = gpu.find(environ, nvml=StandIn({"GPU-a": ["MIG-a", "MIG-b"], "GPU-b": []}))
    assert [device.uuid for device in found] == expected


def test_no_driver_is_fine() -> None:
    assert gpu.find({}, nvml=StandIn(None)) == ((), "no NVIDIA driver answers (Driver Not Loaded)")


def test_memory_by_process() -> None:
    (device,), _ = gpu.find({"CUDA_VISIBLE_DEVICES": "0"}, nvml=StandIn(FOUR))
    assert gpu.used_by_process(device, nvml=StandIn(FOUR)) == {7: 5, 8: 0}
    assert gpu.used_by_process(device, nvml=StandIn({})) == {}


@pytest.mark.gpu
def test_real_gpus_are_found() -> None:
    found, why = gpu.find()
    if not found:
        pytest.skip(why)
    assert all(device.facts.memory_bytes > 10**9 and device.uuid for device in found)


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal:  1000 kB\n", "proc/self/cgroup": "0::/job/step\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_is_the_smallest_of_all_limits(tmp_path: Path) -> None:
    plain = _machine(tmp_path / "plain", {})
    assert cpu.memory_bytes({}, root=plain) == 1000 * 1024
    two = _machine(
        tmp_path / "v2",
        {"sys/fs/cgroup/job/memory.max": "600000\n", "sys/fs/cgroup/job/step/memory.max": "max\n"},
    )
    assert cpu.memory_bytes({}, root=two) == 600_000
    one = _machine(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "500000\n",
        },
    )
    assert cpu.memory_bytes({}, root=one) == 500_000
    large = _machine(tmp_path / "large", {"proc/meminfo": "MemTotal: 9000000 kB\n"})
    slurm = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "2000"}
    assert cpu.memory_bytes(slurm, root=large) == 2000 * 1024**2
    assert cpu.memory_bytes({"SLURM_MEM_PER_NODE": "2000"}, root=large) == 9_000_000 * 1024


def test_cores_are_the_fewest_of_all_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 5, 7, 11, 13})
    plain = _machine(tmp_path / "plain", {})
    assert cpu.cores({}, root=plain) == (2, 3, 5, 7, 11, 13)
    quota = _machine(tmp_path / "v2", {"sys/fs/cgroup/job/cpu.max": "250000 100000\n"})
    assert cpu.cores({}, root=quota) == (2, 3)
    old = _machine(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "3:cpu:/job\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu.cores({}, root=old) == (2,)
    assert cpu.cores({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "4"}, root=plain) == (2, 3, 5, 7)
    side_by_side = [cpu.cores({"SLURM_JOB_ID": str(job), "SLURM_CPUS_ON_NODE": "2"}, root=plain) for job in (7, 8)]
    assert len({*side_by_side[0], *side_by_side[1]}) == 4  # Slurm may bind nobody to the cores that it counts


def test_cores_are_shared_evenly() -> None:
    assert cpu.divide((0, 1, 2, 3, 4), 2) == [(0, 1, 2), (3, 4)]
    assert cpu.divide((4, 6), 3) == [(4,), (6,), (4,)]


def test_cpu_devices_share_the_memory() -> None:
    devices = find_devices("cpu:3")
    assert [device.facts.device for device in devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert sum(device.facts.memory_bytes for device in devices) <= 0.9 * cpu.memory_bytes()
    assert visible(devices) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("odd", ["cpu:0", "cpu:x", "gpu:1", "tpu", "auto:2", ""])
def test_odd_requests_are_refused(odd: str) -> None:
    with pytest.raises(ConfigError, match="cpu:N"):
        find_devices(odd)


def test_gpus_that_are_asked_for_and_not_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no GPU was granted"):
        find_devices("gpu")
    assert find_devices("auto")[0].facts.kind == "cpu"
