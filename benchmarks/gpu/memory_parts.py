"""Parts of `make gpu` on device memory: what Stoker measures and promises, and what faults cost."""

from __future__ import annotations

import os
import time
from typing import Any

import stoker
from benchmarks.gpu.place import GB, Answer, Place
from stoker import context


@context
def takes_torch(size: int) -> Any:
    """So much of the GPU, by PyTorch."""
    import torch

    if not torch.cuda.is_available():
        return _takes_stand_in(size)
    return torch.empty(size, dtype=torch.uint8, device="cuda:0")


@context
def takes_driver(size: int) -> Any:
    """Takes `size` bytes of the GPU from CUDA's driver, so that no framework knows of them."""
    import ctypes
    import os

    if os.environ.get("STOKER_GPU_REHEARSAL"):
        return _takes_stand_in(size)
    from stoker.pilot.devices import cuda

    gpu = cuda.open_first()
    place = ctypes.c_uint64()
    cuda.check(gpu._driver, "cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
    return gpu, place


def _takes_stand_in(size: int) -> int:
    from driver.machine import take

    take(size + 500_000_000)
    return size


def _own(_: Any) -> dict[str, int]:
    import os
    import sys

    torch = sys.modules.get("torch")
    held = torch.cuda.memory_reserved() if torch is not None and torch.cuda.is_available() else 0
    return {"pid": os.getpid(), "torch": held}


def _nvml_of(pid: int) -> tuple[int, int]:
    """What NVML says of a process on the first GPU, and of the whole GPU."""
    from stoker.pilot.devices import nvml as names

    nvml = names.load()
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    used = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return used.get(pid) or 0, int(info.total) - int(info.free)


def _promised(session: Any) -> int:
    """Bytes of the first device that libraries are promised."""
    return int(session.status().pilots[0].devices[0].promised_bytes)


def memory(answer: Answer, place: Place) -> None:
    """What NVML measures of libraries against what the session promises them, and what CUDA takes by itself."""
    size = 2 * GB
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # both libraries on one GPU
    with place.session(devices="gpu") as session:
        for what, recipe in (("torch", takes_torch(size)), ("driver", takes_driver(size))):
            told = stoker.app(context=recipe)(_own)().result(60)
            nvml_bytes, taken = _nvml_of(told["pid"])
            answer[f"{what}: NVML of its process"] = nvml_bytes
            answer[f"{what}: NVML of the whole GPU"] = taken
            if told["torch"]:
                answer[f"{what}: PyTorch holds"] = told["torch"]
                answer[f"{what}: CUDA takes by itself"] = nvml_bytes - told["torch"]
            else:
                answer[f"{what}: CUDA takes by itself"] = nvml_bytes - size
            began = time.monotonic()
            while _promised(session) > 4 * size and time.monotonic() < began + 10.0:
                time.sleep(0.05)
            answer[f"{what}: its promise rests on a measurement after, s"] = time.monotonic() - began
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            status = session.status()
            known = [each.device_bytes for each in status.libraries]
            if len(known) == 2 and all(known) and min(known) >= size:
                break
            time.sleep(0.2)
        for each in status.libraries:
            answer[f"status: {each.recipe} uses"] = each.device_bytes
        first = status.pilots[0].devices[0]
        answer["status: promised"] = first.promised_bytes
        answer["status: the device has"] = first.memory_bytes
        answer["promised covers what is used"] = first.promised_bytes >= sum(known)


def _too_much(_: Any) -> str:
    import torch

    if not torch.cuda.is_available():
        raise MemoryError("a rehearsal")
    return str(torch.empty(1 << 50, dtype=torch.uint8, device="cuda:0").sum())


def _die(_: Any) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def faults(answer: Answer, place: Place) -> None:
    """A call that asks for too much memory fails alone; the memory of a library that is killed is free again."""
    with place.session(devices="gpu") as session:
        recipe = takes_torch(GB)
        own = stoker.app(context=recipe)(_own)
        before = own().result(60)["pid"]
        try:
            stoker.app(context=recipe)(_too_much)().result(60)
            answer["too much memory"] = "was granted"
        except Exception as error:
            answer["too much memory"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        answer["its library lives on"] = own().result(60)["pid"] == before
        _, taken = _nvml_of(before)
        try:
            stoker.app(context=recipe)(_die)().result(100)
        except Exception as error:
            answer["a library that is killed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        answer["a new library serves"] = own().result(60)["pid"] != before
        answer["taken of the GPU before, and with the new library"] = f"{taken:,} and {_nvml_of(before)[1]:,}"
        answer["devices in quarantine"] = sum(
            bool(device.fault) for pilot in session.status().pilots for device in pilot.devices
        )
