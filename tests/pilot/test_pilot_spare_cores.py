from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from driver import machine as standin
from driver.machine import Machine
from fake_manager import FakeManager, recipe

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.manager.factory.pilot_command import build_pilot_options
from stoker.pilot.devices import GrantedDevices, cpu, find_devices, gpu, visibility_variables

GB = 10**9
Find = Callable[..., GrantedDevices]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    def ask(
        wanted: str, *, gpus: int = 1, cores: int = 16, memory: int = 100 * GB, gpu_cores: int = 2
    ) -> GrantedDevices:
        machine = Machine(tmp_path, *[{}] * gpus)
        monkeypatch.setenv("STANDIN_NVML", str(machine.file))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        nvml = standin.load()
        monkeypatch.setattr(gpu, "load_nvml", lambda: nvml)
        monkeypatch.setattr(cpu, "find_usable_cores", lambda: tuple(range(cores)))
        monkeypatch.setattr(cpu, "usable_memory_bytes", lambda: memory)
        return find_devices(wanted, gpu_cores=gpu_cores)

    return ask


def _cores(found: GrantedDevices) -> dict[str, tuple[int, ...]]:
    return {device.facts.device: device.cores for device in found.offered}


def test_gpu_keeps_its_first_cores_and_cpu_devices_get_the_rest(find: Find) -> None:
    found = find("gpu+cpu:2", gpus=2, cores=12)
    assert _cores(found) == {"cuda:0": (0, 1), "cuda:1": (6, 7), "cpu:0": (2, 3, 4, 5), "cpu:1": (8, 9, 10, 11)}
    assert [device.facts.spare for device in found.offered] == [False, False, True, True]
    assert [device.facts.on_host for device in found.offered] == [False, False, True, True]
    assert [device.facts.cores for device in found.offered] == [2, 2, 4, 4]
    assert found.troubles == ()
    assert cpu.cores_outside_cpu_devices(found.offered) == {0, 1, 6, 7}
    assert visibility_variables(found.offered[:1]) == {"CUDA_VISIBLE_DEVICES": "GPU-0"}
    assert visibility_variables(found.offered[2:]) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(("memory", "left"), [(100 * GB, 90 * GB - 24 * GB), (40 * GB, 18 * GB)])
def test_at_most_half_of_the_host_memory_is_reserved_for_gpus(find: Find, memory: int, left: int) -> None:
    sizes = [device.facts.memory_bytes for device in find("gpu+cpu:2", memory=memory).offered if device.facts.spare]
    assert sizes == [left // 2, left // 2]


def test_gpus_divide_all_cores_unless_spare_cores_become_devices(find: Find) -> None:
    assert _cores(find("gpu+cpu", cores=5, gpu_cores=3)) == {"cuda:0": (0, 1, 2), "cpu:0": (3,), "cpu:1": (4,)}
    alone = find("gpu", gpus=2, cores=6)
    assert _cores(alone) == {"cuda:0": (0, 1, 2), "cuda:1": (3, 4, 5)}
    assert cpu.cores_outside_cpu_devices(alone.offered) == frozenset()


def test_missing_spare_core_is_reported_and_the_gpus_are_offered(find: Find) -> None:
    found = find("gpu+cpu:1", gpus=2, cores=4)
    assert _cores(found) == {"cuda:0": (0, 1), "cuda:1": (2, 3)}
    assert found.troubles == (
        "no core is left for CPU devices: the pilot has 4 cores and keeps 2 for each of 2 GPUs; request"
        " more cores ([provider] cores), or lower [pilot] gpu_cores",
    )


@pytest.mark.parametrize("wanted", ["gpu", "gpu+cpu:1"])
def test_pilot_without_its_expected_gpu_does_not_start_on_cores(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no GPU was granted"):
        find_devices(wanted)
    assert find_devices("auto").offered[0].facts.kind == "cpu"


@pytest.mark.parametrize(
    "odd", ["cpu:0", "cpu:x", "gpu:1", "tpu", "auto:2", "", "gpu+cpu:0", "gpu+cpu:x", "gpu+gpu", "auto+cpu", "cpu+gpu"]
)
def test_invalid_device_specifications_are_refused(odd: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu\+cpu:N"):
        find_devices(odd)


def test_setting_of_zero_cores_per_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep at least 1 core"):
        find_devices("gpu+cpu:1", gpu_cores=0)


def _seen() -> tuple[str, list[int], str]:
    return os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]


def _filled(extra: int = 0) -> bytes:
    return b"x" * (64_000_000 + extra)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core leaves no spare core for a GPU pilot")
def test_gpus_and_spare_cores_are_devices_of_one_pilot(manager: FakeManager) -> None:
    site = parse_site('[pilot]\ndevices = "gpu+cpu:1"\ngpu_cores = 1\nprobe = "never"', file="site.toml")
    environment = Machine(manager.base, {}).environment | {"CUDA_VISIBLE_DEVICES": "0"}
    pilot = manager.start_pilot(*build_pilot_options(site.pilot), **environment)
    facts = {device.device: device for device in manager.hello().devices}
    assert [(name, each.kind, each.spare) for name, each in facts.items()] == [
        ("cuda:0", "NVIDIA A10", False), ("cpu:0", "cpu", True),
    ]  # fmt: skip
    kept = psutil.Process(pilot.pid).cpu_affinity()
    assert len(kept) == facts["cuda:0"].cores == 1
    others = sorted(os.sched_getaffinity(0) - set(kept))
    assert facts["cpu:0"].cores <= len(others)

    on_gpu = manager.ready(recipe(_filled), devices=("cuda:0",), device_memory_bytes=2 * GB)
    on_cores = manager.ready(recipe(_filled, 0), library=2, devices=("cpu:0",), device_memory_bytes=GB)
    assert on_gpu.device_bytes < 60_000_000 < on_gpu.resident_bytes, "host memory does not count for a GPU"
    assert on_cores.resident_bytes > 60_000_000
    assert on_cores.device_bytes == 0
    assert manager.results(manager.run(_seen, [()])) == [("GPU-0", kept, "1")]
    cores = others[: facts["cpu:0"].cores]
    assert manager.results(manager.run(_seen, [()], library=2)) == [("", cores, str(len(cores)))]
