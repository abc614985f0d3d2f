from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import machine as standin
from driver.machine import Machine
from fake_manager import FakeManager, recipe

from stoker.contexts.recipe import Needs
from stoker.pilot.devices.monitor import GpuHealth
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFault, LibraryResized

GB = 10**9

Start = Callable[..., Machine]


@pytest.fixture
def start(manager: FakeManager, tmp_path: Path) -> Start:
    def make(*gpus: dict[str, Any], options: tuple[str, ...] = ("--devices", "gpu"), **more: Any) -> Machine:
        machine = Machine(tmp_path, *gpus, **more)
        environment = {**machine.environment, "CUDA_VISIBLE_DEVICES": ",".join(str(n) for n in range(len(gpus)))}
        manager.start_pilot(*options, "--probe", "never", **environment)
        return machine

    return make


def takes(size: float) -> Callable[[], str]:
    """Return a loader that allocates these bytes of GPU memory and returns its visible GPUs."""

    def load() -> str:
        import os

        from driver import machine as standin

        standin.take(size)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    return load


# ---- reports of the driver


def test_lost_gpus_are_reported_and_other_gpus_serve_calls(manager: FakeManager, start: Start) -> None:
    machine = start({}, {}, {"mode": 3}, {"state": "lost"})
    hello = manager.hello()
    assert [(facts.device, facts.processes) for facts in hello.devices] == [("cuda:0", 0), ("cuda:1", 0), ("cuda:2", 1)]
    assert hello.troubles == ("GPU 3 was left out: GPU is lost",)
    manager.ready(recipe(takes(GB)), devices=("cuda:0",), device_memory_bytes=2 * GB)
    machine.gpus[2]["state"] = "lost"
    machine.write(events=[["GPU-1", 13], ["GPU-1", 79]])
    for device, words in (
        ("cuda:1", "the driver reported Xid 79 (it has fallen off the bus)"),
        ("cuda:2", "the driver says: GPU is lost"),
    ):
        assert manager.wait_for(DeviceFault, device=device).reason == f"{device}: {words}"
    assert manager.results(manager.run(os.getpid, [()]))  # the other GPU still works
    assert [type(message) for message in manager.said].count(DeviceFault) == 2


def test_gpu_health_check_reports_ecc_errors_xids_and_lost_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, {"errors": 2}, {"errors": None}, {})
    monkeypatch.setenv("STANDIN_NVML", str(machine.file))
    nvml = standin.load()
    nvml.nvmlInit()
    first, second, third = (GpuHealth(nvml.nvmlDeviceGetHandleByIndex(n), nvml=nvml) for n in (0, 1, 2))
    assert (first.find_fault(), second.find_fault()) == ("", "")  # errors before the start of this pilot do not count
    machine.gpus[0]["errors"] = 3
    machine.gpus[2]["state"] = "unknown"
    machine.gpus[1]["state"] = "lost"
    machine.write(events=[["GPU-1", 13], ["GPU-1", 79]])
    assert first.find_fault() == "it had 1 uncorrectable memory errors (ECC)"
    assert second.find_fault() == "the driver reported Xid 79 (it has fallen off the bus)"
    assert first.find_fault() == ""
    assert second.find_fault() == "the driver says: GPU is lost"
    assert [third.find_fault() for _ in range(3)] == ["", "", "the driver says: Unknown Error"]


def test_hanging_driver_is_a_fault_of_its_gpu_and_heartbeats_continue(manager: FakeManager, start: Start) -> None:
    machine = start({}, {}, options=("--devices", "gpu", "--driver-limit", "1"))
    manager.ready(recipe(takes(GB)), devices=("cuda:0",), device_memory_bytes=2 * GB)
    machine.write(hangs="GPU-1")
    fault = manager.wait_for(DeviceFault)
    assert fault == DeviceFault(DeviceId("cuda:1"), "cuda:1: the NVIDIA driver has not answered for 1 s")
    before = len(manager.heartbeats)
    manager.until(lambda: len(manager.heartbeats) >= before + 2, what="heartbeats")
    assert manager.results(manager.run(os.getpid, [()]))


# ---- memory


def test_gpu_memory_allocated_outside_torch_is_measured(manager: FakeManager, start: Start) -> None:
    start({})
    ready = manager.ready(recipe(takes(10 * GB)), devices=("cuda:0",), device_memory_bytes=23 * GB)
    # the driver reports the size, or the size is still unknown (0); host memory does not count
    assert ready.device_bytes in (0, 10 * GB)
    assert manager.wait_for(LibraryResized, measured=True).device_memory_bytes == 11 * GB
    manager.until(lambda: [use.device_bytes for use in manager.heartbeats[-1].libraries] == [10 * GB])
    manager.start(recipe(takes(GB), 0), library=2, devices=("cuda:0",), device_memory_bytes=14 * GB)
    assert "13.0 GB of 24.0 GB free" in manager.gone(2).failure.message  # type: ignore[union-attr]


# ---- the zygote's view


def test_zygote_sees_no_gpu_and_each_library_its_own(manager: FakeManager, start: Start) -> None:
    start({}, {"mig": [{"uuid": "MIG-a", "memory": 5 * GB}]})

    def look() -> tuple[str, str]:
        import os
        from pathlib import Path

        environ = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        zygote = next(entry for entry in environ if entry.startswith(b"CUDA_VISIBLE_DEVICES="))
        return zygote.decode(), os.environ["CUDA_VISIBLE_DEVICES"]

    for library, device, name in ((1, "cuda:0", "GPU-0"), (2, "cuda:1", "MIG-a")):
        manager.ready(recipe(takes(GB), needs=Needs()), library=library, devices=(device,), device_memory_bytes=2 * GB)
        assert manager.results(manager.run(look, [()], library=library)) == [("CUDA_VISIBLE_DEVICES=", name)]


def _fake_torch(folder: Path) -> None:
    """Write a fake torch that only reports if a GPU is visible, and a module that stores the answer."""
    (folder / "torch" / "cuda").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("from . import cuda\n")
    (folder / "torch" / "cuda" / "__init__.py").write_text(
        "import os\ndef is_available():\n    return bool(os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
        "def is_initialized():\n    return False\n"
    )
    (folder / "keeps_asking.py").write_text("import torch\nDEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n")
    (folder / "asks_later.py").write_text("import torch\n")


def test_preloaded_module_that_counts_gpus_gets_a_true_answer(manager: FakeManager, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    _fake_torch(modules)
    machine = Machine(tmp_path, {})
    path = os.pathsep.join((str(modules), machine.environment["PYTHONPATH"]))
    manager.start_pilot("--devices", "gpu", "--probe", "never", **machine.environment | {"PYTHONPATH": path})

    def look() -> tuple[str, bool, bool]:

        import torch

        kept = getattr(sys.modules.get("keeps_asking"), "DEVICE", "")
        return kept, torch.cuda.is_available(), "stoker.pilot.zygote.server" in sys.modules

    def load(module: str) -> None:
        __import__(module)

    for library, (module, afresh) in enumerate((("asks_later", False), ("keeps_asking", True)), start=1):
        made = recipe(load, module, preload=(module,))
        manager.ready(made, library=library, devices=("cuda:0",), device_memory_bytes=2 * GB)
        ((kept, available, forked),) = manager.results(manager.run(look, [()], library=library))
        assert (kept, available, forked) == ("cuda" if afresh else "", True, not afresh)
