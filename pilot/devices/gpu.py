"""GPUs, through NVML: asked for only here, and fine without a driver.

`CUDA_VISIBLE_DEVICES` is how batch systems say what they granted: indices, or `GPU-` and `MIG-` identifiers, or
beginnings of these. As CUDA does, the list ends at the first entry that names nothing. Without the variable all GPUs
of the machine count as granted. Indices count in PCI order here, as NVML does; where CUDA might count otherwise the
libraries are given identifiers, so they see the device that is meant.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.manager.protocol.ids import DeviceId
from stoker.manager.protocol.to_manager import DeviceFacts
from stoker.pilot.devices.device import Device
from stoker.pilot.devices.health import Health


def find(environ: Mapping[str, str] = os.environ, *, nvml: Any = None) -> tuple[tuple[Device, ...], str]:
    """GPUs that were granted; or none, and why."""
    granted = environ.get("CUDA_VISIBLE_DEVICES")
    if granted is not None and not granted.strip():
        return (), "CUDA_VISIBLE_DEVICES is set to nothing"
    nvml = nvml or _nvml()
    if nvml is None:
        return (), "the pynvml module is missing (nvidia-ml-py)"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"no NVIDIA driver answers ({error})"
    here = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    units = [unit for handle in here for unit in (_parts(nvml, handle) or [handle])]
    chosen = units if granted is None else _granted(nvml, here, units, granted)
    if not chosen:
        return (), f"CUDA_VISIBLE_DEVICES={granted!r} names none of the {len(here)} GPUs here"
    return tuple(_device(nvml, index, handle) for index, handle in enumerate(chosen)), ""


def used_by_process(device: Device, *, nvml: Any = None) -> dict[int, int]:
    """Bytes of the device's memory by process id, where the driver tells; empty otherwise."""
    nvml = nvml or _nvml()
    if nvml is None or not device.uuid:
        return {}
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {process.pid: process.usedGpuMemory or 0 for process in running}


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _uuid(nvml: Any, handle: Any) -> str:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _parts(nvml: Any, handle: Any) -> list[Any]:
    """The MIG devices into which a GPU is cut; none for a whole one."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        if not current:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return []
    parts = []
    for index in range(count):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:
            continue
    return parts


def _granted(nvml: Any, here: list[Any], units: list[Any], granted: str) -> list[Any]:
    chosen: list[Any] = []
    for word in granted.split(","):
        name = word.strip()
        if name.isdecimal():
            whole = [here[int(name)]] if int(name) < len(here) else []
            found = [(_parts(nvml, handle) or [handle])[0] for handle in whole]
        else:
            found = [unit for unit in [*here, *units] if name and _uuid(nvml, unit).startswith(name)][:1]
        if not found or any(_uuid(nvml, found[0]) == _uuid(nvml, unit) for unit in chosen):
            break
        chosen += found
    return chosen


def _device(nvml: Any, index: int, handle: Any) -> Device:
    kind = nvml.nvmlDeviceGetName(handle)
    kind = kind.decode() if isinstance(kind, bytes) else str(kind)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    uuid = _uuid(nvml, handle)
    facts = DeviceFacts(device=DeviceId(f"cuda:{index}"), kind=kind, memory_bytes=memory)
    return Device(facts=facts, cuda=uuid, uuid=uuid)


def health_of(devices: tuple[Device, ...], *, nvml: Any = None) -> Health | None:
    """A watch over what the driver reports of these GPUs; None where there is no NVML."""
    nvml = nvml or _nvml()
    return Health(devices, nvml=nvml) if nvml is not None else None
