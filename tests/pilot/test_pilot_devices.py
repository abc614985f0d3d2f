from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import machine as standin
from driver.machine import Machine

from stoker.manager.cli import doctor_machine
from stoker.pilot import devices
from stoker.pilot.core.events import MemoryShortage
from stoker.pilot.devices import GrantedDevices, PilotDevice, cpu, find_devices, gpu, monitor, visibility_variables
from stoker.pilot.devices.gpu import gpu_island_numbers
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFacts
from stoker.site import ProviderKind

Driver = Callable[..., tuple[Any, Machine]]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Machine]]:
    def make(*gpus: dict[str, Any], **more: Any) -> tuple[Any, Machine]:
        machine = Machine(tmp_path, *gpus, **more)
        monkeypatch.setenv("STANDIN_NVML", str(machine.file))
        return standin.load(), machine

    return make


def test_fake_nvml_module_behaves_like_the_real_module(driver: Driver) -> None:
    import pynvml as real

    nvml, _ = driver({}, {"state": "lost"})
    for name, value in vars(nvml).items():
        if name.startswith(("NVML_", "nvmlEventType", "nvmlMemory")):
            assert getattr(real, name) == value, name
        elif name.startswith("nvml"):
            wants = inspect.signature(inspect.unwrap(getattr(real, name))).parameters
            assert len(inspect.signature(value).parameters) == len(wants), name
    for code, words in nvml._WORDS.items():
        assert str(real.NVMLError(code)) == words
        assert real.NVMLError(code).value == nvml.NVMLError(code).value == code
    nvml.nvmlInit()
    once, again = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(0)
    assert once is not again
    assert isinstance(once, ctypes._Pointer)
    assert issubclass(real.c_nvmlDevice_t, ctypes._Pointer)


def test_every_used_name_of_nvml_exists_in_the_real_module() -> None:
    import pynvml as real

    used = set()
    for file in (*Path(devices.__file__).parent.glob("*.py"), Path(doctor_machine.__file__)):
        used |= set(re.findall(r"\b(?:pynvml|nvml)\.((?:nvml|NVML)\w+)", file.read_text()))
        used |= set(re.findall(r'"(NVML_\w+)"', file.read_text()))
    assert len(used) > 20
    assert [name for name in sorted(used) if not hasattr(real, name)] == []


def _found(found: GrantedDevices) -> list[str]:
    return [device.uuid for device in found.offered]


SLURM = {"SLURM_JOB_ID": "7"}
CONDOR = {"_CONDOR_SLOT": "slot1_1"}


def shown(names: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "0 1 2 3"),
        (shown("3,1"), "3 1"),
        (shown(" 1 , 2"), "1 2"),
        (shown("GPU-2"), "2"),
        (shown("1,9,2"), "1"),  # as in CUDA, an unknown index ends the list
        (shown("1,1"), "1"),
        (shown("NoDevFiles"), ""),
        (shown("-1"), ""),
        (shown(""), ""),
        ({**SLURM, "SLURM_JOB_GPUS": "2,3"}, "2 3"),
        ({**SLURM, "SLURM_JOB_GPUS": "0,1,2", "SLURM_STEP_GPUS": "1"}, "1"),
        ({**SLURM, **shown("0"), "SLURM_JOB_GPUS": "2"}, "0"),
        ({**SLURM, "SLURM_JOB_GPUS": "gpu:3"}, "3"),
        (SLURM, ""),
        ({"SLURM_JOB_GPUS": "2"}, "0 1 2 3"),  # a variable left in a shell outside a job
        ({**CONDOR, "_CONDOR_AssignedGPUs": "CUDA1,CUDA3"}, "1 3"),
        ({**CONDOR, "_CONDOR_AssignedGPUs": "GPU-2"}, "2"),
        (CONDOR, ""),
        ({"PBS_JOBID": "12.head"}, ""),
        ({"LSB_JOBID": "12"}, ""),
    ],
)
def test_granted_gpus_are_read_from_the_environment(driver: Driver, environ: dict[str, str], expected: str) -> None:
    nvml, _ = driver({}, {}, {}, {})
    found = gpu.find_gpus(environ, nvml=nvml)
    names = [f"GPU-{number}" for number in expected.split()]
    assert _found(found) == names
    assert [device.facts.device for device in found.offered] == [f"cuda:{n}" for n in range(len(names))]
    assert visibility_variables(found.offered) == shown(",".join(names))
    assert bool(found.lacks) == (not names)
    if not names and "CUDA_VISIBLE_DEVICES" not in environ:
        assert "granted no GPU to this job" in found.lacks


@pytest.mark.parametrize(
    ("switches", "nodes", "islands"),
    [
        ((0, 1, 0, 1), (0, 0, 0, 0), [1, 2, 1, 2]),
        ((0, None, 0, None), (0, 0, 1, 1), [1, 2, 1, 4]),
        ((None, None, None, None), (0, 0, 1, 1), [1, 1, 2, 2]),
        ((None, None, None, None), (-1, -1, -1, -1), [0, 0, 0, 0]),
    ],
    ids=["two switches", "two linked", "numa nodes", "unknown"],
)
def test_gpus_with_fast_links_are_one_island(
    driver: Driver, tmp_path: Path, switches: tuple[int | None, ...], nodes: tuple[int, ...], islands: list[int]
) -> None:
    nvml, _ = driver(*({"switch": switch} for switch in switches))
    nvml.nvmlInit()
    for number, node in enumerate(nodes):
        place = tmp_path / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(4)]
    assert gpu_island_numbers(nvml, handles, root=tmp_path) == islands


def test_each_device_reports_its_island_of_fast_links(driver: Driver) -> None:
    nvml, _ = driver(*({"switch": number % 2} for number in range(4)))
    found = gpu.find_gpus({"CUDA_VISIBLE_DEVICES": "1,2,3"}, nvml=nvml)
    assert [device.facts.island for device in found.offered] == [1, 2, 1]


def test_gpu_numbers_of_slurm_are_those_of_device_files(driver: Driver) -> None:
    nvml, _ = driver({"number": 3}, {"number": 1}, {"number": 0}, {"number": 2})  # NVML counts in PCI order
    assert _found(gpu.find_gpus({**SLURM, "SLURM_JOB_GPUS": "2,3"}, nvml=nvml)) == ["GPU-3", "GPU-0"]


@pytest.mark.parametrize("shown", ["all, and refuses", "its own alone"])
def test_cgroup_shows_the_granted_gpus_renumbered(driver: Driver, shown: str) -> None:
    others = [{"state": "refused"}] * 2 if shown == "all, and refuses" else []
    nvml, _ = driver(*others, {"number": 2, "uuid": "GPU-c"}, {"number": 3, "uuid": "GPU-d"})
    assert _found(gpu.find_gpus({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1"}, nvml=nvml)) == ["GPU-c", "GPU-d"]
    assert _found(gpu.find_gpus({**SLURM, "SLURM_JOB_GPUS": "2,3"}, nvml=nvml)) == ["GPU-c", "GPU-d"]
    assert _found(gpu.find_gpus({}, nvml=nvml)) == ["GPU-c", "GPU-d"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("lost", "GPU 1 was left out: GPU is lost"),
        ("unknown", "GPU 1 was left out: Unknown Error"),
        ("no-memory", "GPU 1 was left out: its memory cannot be read (Not Supported)"),
    ],
)
@pytest.mark.parametrize("granted", [None, "0,1,2", "GPU-0,GPU-1,GPU-2"])
def test_bad_gpu_leaves_the_other_gpus_usable(driver: Driver, state: str, words: str, granted: str | None) -> None:
    nvml, _ = driver({}, {"state": state}, {})
    environ = {} if granted is None else {"CUDA_VISIBLE_DEVICES": granted}
    found = gpu.find_gpus(environ, nvml=nvml)
    assert _found(found) == ["GPU-0", "GPU-2"]
    assert len(found.troubles) == 1
    assert words in found.troubles[0]
    assert found.lacks == ""


def test_node_of_bad_gpus_reports_the_fault_of_each_gpu(driver: Driver) -> None:
    nvml, _ = driver({"state": "lost"}, {"mode": 2})
    assert gpu.find_gpus({}, nvml=nvml).lacks == (
        "GPU 0 was left out: GPU is lost; GPU 1 was left out: its compute mode is PROHIBITED (nvidia-smi -c)"
    )


@pytest.mark.parametrize(("mode", "processes"), [(0, 0), (1, 1), (3, 1)])
def test_compute_mode_limits_the_processes_of_a_gpu(driver: Driver, mode: int, processes: int) -> None:
    nvml, _ = driver({"mode": mode})
    (device,) = gpu.find_gpus({}, nvml=nvml).offered
    assert device.facts.processes == processes


def test_memory_reserved_by_the_driver_is_not_offered(driver: Driver) -> None:
    nvml, _ = driver({"memory": 80 * 10**9, "reserved": 10**9})
    (device,) = gpu.find_gpus({}, nvml=nvml).offered
    assert (device.facts.memory_bytes, device.facts.process_bytes) == (79 * 10**9, gpu.CUDA_PROCESS_BYTES)


PARTS = [{"mig": [{"uuid": "MIG-a", "memory": 5 * 10**9}, {"uuid": "MIG-b", "memory": 5 * 10**9}]}, {}]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["MIG-a", "MIG-b", "GPU-1"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-b"}, ["MIG-b"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["MIG-a"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,MIG-a"}, ["GPU-1", "MIG-a"]),
        ({**SLURM, "SLURM_JOB_GPUS": "0,1,2"}, ["MIG-a", "MIG-b", "GPU-1"]),
    ],
)
def test_mig_slices_are_devices(driver: Driver, environ: dict[str, str], expected: list[str]) -> None:
    nvml, _ = driver(*PARTS)
    assert _found(gpu.find_gpus(environ, nvml=nvml)) == expected


def test_missing_driver_is_no_error(driver: Driver) -> None:
    nvml, _ = driver(init=9)
    assert gpu.find_gpus({}, nvml=nvml).lacks == "NVML missing: no NVIDIA driver answers (Driver Not Loaded)"


def test_wait_for_a_hanging_driver_is_bounded(driver: Driver) -> None:
    nvml, _ = driver({}, hangs="all")
    began = time.monotonic()
    assert gpu.find_gpus({}, nvml=nvml, limit_s=0.2).lacks == "the NVIDIA driver has not answered for 0.2 s"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("by_process", "processes", "taken", "trusted", "expected"),
    [
        ({7: 5, 8: 2, 99: 50}, {1: {7, 8}, 2: {9}}, 57, True, {1: 7, 2: 0}),
        ({}, {1: {7}}, 0, True, {1: 0}),
        ({7: None}, {1: {7}}, 30, True, {}),  # the driver gives no value
        # in another PID namespace with one process, all use since the start of this process is charged to it
        ({1007: 5}, {1: {7}}, 25, False, {1: 5}),
        ({7: 5, 1008: 2}, {1: {7}}, 27, False, {1: 7}),  # process 7 of the driver belongs to another container
        ({7: 5, 1008: 2}, {1: {7}, 2: {8}}, 27, False, {}),  # two processes cannot be distinguished
        ({7: 5, 8: 2}, {1: {7}, 2: {8}}, 27, False, {1: 5, 2: 2}),  # the driver knows the process ids of the container
        (None, {1: {7}}, 26, False, {1: 6}),
        (None, {1: {7}}, -1, True, {}),
    ],
)
def test_device_memory_is_attributed_to_processes(
    by_process: Any, processes: Any, taken: int, trusted: bool, expected: dict[int, int]
) -> None:
    found = monitor.divide_gpu_memory_by_library(
        by_process, processes, used_bytes=taken, empty_gpu_bytes=20, are_pids_reliable=trusted
    )
    assert found == expected


def test_pilot_of_a_gpu_job_without_gpus_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = find_devices("auto", gpus_asked=1)
    faults = {device.facts.fault for device in found.offered}
    assert faults == {
        "the job requested 1 GPU, but the pilot found none (CUDA_VISIBLE_DEVICES is empty);"
        ' set [pilot] devices = "cpu" to use its cores'
    }
    assert {device.facts.fault for device in find_devices("cpu", gpus_asked=1).offered} == {""}
    assert {device.facts.fault for device in find_devices("auto").offered} == {""}


def _machine(root: Path, **files: str) -> Path:
    """Write files of a Linux machine: `proc__vmstat` becomes `proc/vmstat`, `cgroup__job__memory.max` becomes
    `sys/fs/cgroup/job/memory.max`.
    """
    given = {"proc__meminfo": "MemTotal: 9000000 kB\n", "proc__self__cgroup": "0::/job/step\n", **files}
    for name, text in given.items():
        path = root / name.replace("__", "/").replace("cgroup/", "sys/fs/cgroup/", name.startswith("cgroup"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


OLD = {"proc__self__cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n"}
"""The groups of a process in version 1 of control groups."""
ALL = 9_000_000 * 1024
JOB = {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "3"}


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({}, {}, ALL),
        ({"cgroup__job__memory.max": "600000\n", "cgroup__job__step__memory.max": "max\n"}, {}, 600_000),
        ({**OLD, "cgroup__memory__job__memory.limit_in_bytes": "500000\n"}, {}, 500_000),
        ({}, {**JOB, "SLURM_MEM_PER_NODE": "2000"}, 2000 * 1024**2),
        ({}, {"SLURM_MEM_PER_NODE": "2000"}, ALL),  # a variable outside a job
        ({}, {**JOB, "SLURM_MEM_PER_CPU": "100"}, 300 * 1024**2),
        ({}, {**JOB, "SLURM_MEM_PER_CPU": "0"}, ALL),  # 0: all memory of the node
        ({}, {**JOB, "SLURM_MEM_PER_GPU": "1000", "SLURM_GPUS_ON_NODE": "2"}, 2000 * 1024**2),
        ({"cgroup__job__memory.max": "600000\n"}, {**JOB, "SLURM_MEM_PER_CPU": "100"}, 600_000),
    ],
)
def test_memory_is_the_smallest_of_all_limits(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], expected: int
) -> None:
    assert cpu.usable_memory_bytes(environ, root=_machine(tmp_path, **files)) == expected


def test_out_of_memory_kill_reports_memory_of_other_processes(tmp_path: Path) -> None:
    root = _machine(
        tmp_path / "v2",
        **{
            "proc__meminfo": "MemTotal: 1000 kB\nMemAvailable: 600 kB\n",
            "proc__vmstat": "pgfault 7\noom_kill 3\n",
            "cgroup__job__memory.max": "600000\n",
            "cgroup__job__memory.stat": "anon 400000\nfile 190000\nshmem 100000\n",
        },
    )
    now = [0.0]
    kills = monitor.OomKillDetector(lambda: 150_000, root=root, clock=lambda: now[0])
    assert kills.measure_shortage() is None, "no process was killed since"
    (root / "proc/vmstat").write_text("pgfault 9\noom_kill 4\n")
    # shared memory counts as used by others, because its owner is unknown
    short = MemoryShortage(room_bytes=100_000, others_bytes=250_000)
    assert kills.measure_shortage() == short
    now[0] += monitor.KILL_EXPLAINS_S / 2
    assert kills.measure_shortage() == short, "one shortage may end several libraries"
    now[0] += monitor.KILL_EXPLAINS_S
    assert kills.measure_shortage() is None, "the shortage is over"
    unknown = monitor.OomKillDetector(lambda: None, root=root, clock=lambda: now[0])
    (root / "proc/vmstat").write_text("oom_kill 5\n")
    assert unknown.measure_shortage() is None, "this pilot's own use cannot be read"
    one = _machine(
        tmp_path / "v1",
        **OLD,
        **{
            "cgroup__memory__job__memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup__memory__job__memory.stat": "total_rss 1\n",
            "proc__meminfo": "MemTotal: 1000 kB\nMemAvailable: 10 kB\n",
        },
    )
    kills = monitor.OomKillDetector(lambda: 0, root=one)
    (one / "proc/vmstat").write_text("oom_kill 1\n")
    assert kills.measure_shortage() == MemoryShortage(room_bytes=10 * 1024, others_bytes=990 * 1024), (
        "the node's own memory"
    )


def test_memory_of_processes_counts_private_anonymous_memory() -> None:
    before = monitor.anonymous_bytes(iter([os.getpid()]))
    # new memory, which no earlier test has used
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept.write(os.urandom(32 << 20))
        after = monitor.anonymous_bytes(iter([os.getpid()]))
    assert before is not None
    assert after is not None
    assert after - before > 20 << 20
    assert monitor.anonymous_bytes(iter([0])) == 0


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({}, {}, (2, 3, 5, 7, 11, 13)),
        ({"cgroup__job__cpu.max": "250000 100000\n"}, {}, (2, 3)),
        ({**OLD, "cgroup__cpu__job__cpu.cfs_quota_us": "5\n", "cgroup__cpu__job__cpu.cfs_period_us": "9\n"}, {}, (2,)),
        ({}, {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "4"}, (2, 3, 5, 7)),
    ],
)
def test_number_of_cores_is_the_smallest_of_all_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], environ: dict[str, str], expected: Any
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 5, 7, 11, 13})
    assert cpu.find_usable_cores(environ, root=_machine(tmp_path, **files)) == expected


def test_jobs_that_slurm_does_not_bind_take_different_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 5, 7, 11, 13})
    jobs = [{"SLURM_JOB_ID": str(job), "SLURM_CPUS_ON_NODE": "2"} for job in (7, 8)]
    first, second = (cpu.find_usable_cores(job, root=_machine(tmp_path)) for job in jobs)
    assert len({*first, *second}) == 4


def test_cpu_devices_share_the_memory() -> None:
    devices = find_devices("cpu:3").offered
    assert [device.facts.device for device in devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert sum(device.facts.memory_bytes for device in devices) <= 0.9 * cpu.usable_memory_bytes()
    assert visibility_variables(devices) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("kind", list(ProviderKind))
def test_pilot_recognizes_the_jobs_of_every_batch_system(kind: ProviderKind) -> None:
    systems = set(gpu.JOB_VARIABLES.values())
    seen_whole = {ProviderKind.LOCAL, ProviderKind.KUBERNETES}  # a container sees only the GPUs of its pod
    assert (kind.title in systems) == (kind not in seen_whole)


def test_half_of_the_spare_memory_is_for_sleeping_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "usable_memory_bytes", lambda: 100 * 10**9)
    gpu_device = PilotDevice(facts=DeviceFacts(DeviceId("gpu:0"), "NVIDIA A10", 24 * 10**9))
    beside = cpu.make_cpu_devices((0, 1), 1, memory_bytes=50 * 10**9, spare=True)
    assert cpu.sleeper_bytes((gpu_device,)) == 45 * 10**9
    assert cpu.sleeper_bytes((gpu_device, *beside)) == 20 * 10**9
    assert cpu.sleeper_bytes(cpu.make_cpu_devices((0, 1), 2, memory_bytes=90 * 10**9)) == 0
