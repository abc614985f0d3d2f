"""A stand-in for NVIDIA's driver on nodes without GPU: `pynvml` over a machine that a file describes.

Put this folder first on a pilot's path. `STANDIN_NVML` names a JSON file. Each query reads the file again, so a test
can break a GPU while a pilot runs (`machine.py` writes the file):

    {"gpus": [{"uuid": "GPU-0", "name": "NVIDIA A10", "memory": 24e9, "reserved": 0, "number": 0, "mode": 0,
               "state": "", "errors": 0, "mig": [{"uuid": "MIG-0", "name": ..., "memory": ...}],
               "used": {"1234": 5e9}, "switch": 1}],
     "init": 0, "hangs": "", "events": [["GPU-0", 79]], "pid_offset": 0, "blind": false}

`state` of a GPU: `lost`, `refused` (cgroup of another job), `no-memory` (memory queries fail), `unknown`.
`hangs`: `all` or the UUID of a GPU whose queries block. `init`: a code with which `nvmlInit` fails.
`used`: bytes by process. A living process can add `{"GPU-0": bytes}` in the file `use.d/PID` next to the JSON file, so
that code in a library uses GPU memory. `pid_offset` is added to process ids, as by a driver in another PID namespace.
`blind` gives `usedGpuMemory` as None.

A test compares names, codes, errors and handles (each query returns a new pointer) with nvidia-ml-py. Without
`STANDIN_NVML` the machine has four intact A10.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_UNKNOWN = 999
NVML_COMPUTEMODE_DEFAULT = 0
NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
NVML_COMPUTEMODE_PROHIBITED = 2
NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
NVML_P2P_STATUS_NOT_SUPPORTED = 5
nvmlEventTypeXidCriticalError = 8
nvmlMemory_v2 = 0x2000028

_WORDS = {
    NVML_ERROR_UNINITIALIZED: "Uninitialized",
    NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
    NVML_ERROR_NOT_SUPPORTED: "Not Supported",
    NVML_ERROR_NO_PERMISSION: "Insufficient Permissions",
    NVML_ERROR_NOT_FOUND: "Not Found",
    NVML_ERROR_DRIVER_NOT_LOADED: "Driver Not Loaded",
    NVML_ERROR_TIMEOUT: "Timeout",
    NVML_ERROR_LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    NVML_ERROR_GPU_IS_LOST: "GPU is lost",
    NVML_ERROR_RESET_REQUIRED: "GPU requires restart",
    NVML_ERROR_UNKNOWN: "Unknown Error",
}
_HANG_S = 3600.0


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _WORDS.get(self.value, f"NVML Error with code {self.value}")


class struct_c_nvmlDevice_t(ctypes.Structure):
    pass


c_nvmlDevice_t = ctypes.POINTER(struct_c_nvmlDevice_t)
_places: dict[str, ctypes.Array[ctypes.c_char]] = {}
_initialized = False


def _machine() -> dict[str, Any]:
    place = os.environ.get("STANDIN_NVML")
    if not place:
        node = os.environ.get("SLURMD_NODENAME", "none")
        return {"gpus": [{"uuid": f"GPU-{node}-{index}", "name": "NVIDIA A10"} for index in range(4)]}
    found: dict[str, Any] = json.loads(Path(place).read_bytes())
    return found


def _hang(machine: dict[str, Any], uuid: str = "") -> None:
    if machine.get("hangs") in (*([uuid] if uuid else []), "all"):
        time.sleep(_HANG_S)


def _handle(uuid: str) -> Any:
    place = _places.setdefault(uuid, ctypes.create_string_buffer(8))
    return ctypes.cast(place, c_nvmlDevice_t)


def _uuid(handle: Any) -> str:
    address = ctypes.cast(handle, ctypes.c_void_p).value
    return next(uuid for uuid, place in _places.items() if ctypes.addressof(place) == address)


def _find(uuid: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the GPU or MIG part with this name, and its GPU."""
    if not _initialized:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    machine = _machine()
    for gpu in machine["gpus"]:
        for unit in (gpu, *gpu.get("mig", ())):
            if unit["uuid"] == uuid:
                _hang(machine, gpu["uuid"])
                return unit, gpu
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def _ask(handle: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    unit, gpu = _find(_uuid(handle))
    state = gpu.get("state", "")
    if state == "lost":
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    if state == "unknown":
        raise NVMLError(NVML_ERROR_UNKNOWN)
    return unit, gpu


def nvmlInit() -> None:
    global _initialized
    machine = _machine()
    _hang(machine)
    if machine.get("init"):
        raise NVMLError(int(machine["init"]))
    _initialized = True


def nvmlSystemGetDriverVersion() -> str:
    return "580.0.0"


def nvmlSystemGetCudaDriverVersion() -> int:
    return 13000


def nvmlDeviceGetCount() -> int:
    machine = _machine()
    _hang(machine)
    return len(machine["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> Any:
    gpus = _machine()["gpus"]
    if not 0 <= index < len(gpus):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return _handle_of(gpus[index]["uuid"])


def nvmlDeviceGetHandleByUUID(uuid: str) -> Any:
    return _handle_of(uuid)


def _handle_of(uuid: str) -> Any:
    _, gpu = _find(uuid)
    if gpu.get("state") == "refused":
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    if gpu.get("state") == "lost":
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return _handle(uuid)


def nvmlDeviceGetUUID(handle: Any) -> str:
    unit, _ = _ask(handle)
    return str(unit["uuid"])


def nvmlDeviceGetName(handle: Any) -> str:
    unit, _ = _ask(handle)
    return str(unit.get("name", "NVIDIA A10"))


def nvmlDeviceGetMinorNumber(handle: Any) -> int:
    unit, gpu = _ask(handle)
    if unit is not gpu:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return int(gpu["number"]) if "number" in gpu else _machine()["gpus"].index(gpu)


def nvmlDeviceGetPciInfo(handle: Any) -> Any:
    _, gpu = _ask(handle)
    return SimpleNamespace(busId=f"00000000:{_machine()['gpus'].index(gpu):02X}:00.0")


def nvmlDeviceGetP2PStatus(device1: Any, device2: Any, p2pIndex: int) -> int:
    """GPUs with the same number `switch` are linked."""
    switches = [_ask(handle)[1].get("switch") for handle in (device1, device2)]
    linked = p2pIndex == NVML_P2P_CAPS_INDEX_NVLINK and switches[0] is not None and switches[0] == switches[1]
    return NVML_P2P_STATUS_OK if linked else NVML_P2P_STATUS_NOT_SUPPORTED


def nvmlDeviceGetMemoryInfo(handle: Any, version: int | None = None) -> Any:
    unit, gpu = _ask(handle)
    if gpu.get("state") == "no-memory":
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    total, reserved = int(unit.get("memory", 24e9)), int(unit.get("reserved", 0))
    used = sum(_used(unit).values())
    free = total - reserved - used
    if version == nvmlMemory_v2:
        return SimpleNamespace(total=total, reserved=reserved, free=free, used=used)
    return SimpleNamespace(total=total, free=free, used=used + reserved)


def _used(unit: dict[str, Any]) -> dict[int, int]:
    used = {int(pid): int(size) for pid, size in unit.get("used", {}).items()}
    place = os.environ.get("STANDIN_NVML", "")
    for file in Path(place).parent.glob("use.d/*") if place else ():
        size = json.loads(file.read_bytes() or b"{}").get(unit["uuid"], 0)
        if size and os.path.exists(f"/proc/{file.name}"):
            used[int(file.name)] = int(size)
    return used


def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[Any]:
    unit, _ = _ask(handle)
    machine = _machine()
    offset, blind = int(machine.get("pid_offset", 0)), bool(machine.get("blind"))
    return [
        SimpleNamespace(pid=pid + offset, usedGpuMemory=None if blind else size) for pid, size in _used(unit).items()
    ]


def nvmlDeviceGetComputeMode(handle: Any) -> int:
    unit, gpu = _ask(handle)
    if unit is not gpu:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return int(gpu.get("mode", NVML_COMPUTEMODE_DEFAULT))


def nvmlDeviceGetMigMode(handle: Any) -> list[int]:
    _, gpu = _ask(handle)
    if "mig" not in gpu:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return [1, 1]


def nvmlDeviceGetMaxMigDeviceCount(handle: Any) -> int:
    _ask(handle)
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(device: Any, index: int) -> Any:
    _, gpu = _ask(device)
    parts = gpu.get("mig", ())
    if index >= len(parts):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return _handle(parts[index]["uuid"])


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(migDevice: Any) -> Any:
    _, gpu = _ask(migDevice)
    return _handle(gpu["uuid"])


def nvmlDeviceGetTotalEccErrors(handle: Any, errorType: int, counterType: int) -> int:
    unit, gpu = _ask(handle)
    if unit is not gpu or gpu.get("errors") is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return int(gpu["errors"])


class _Events(list[str]):
    """The GPU UUIDs of an event set; `given` counts the delivered events."""

    given = 0


def nvmlEventSetCreate() -> Any:
    return _Events()


def nvmlDeviceRegisterEvents(handle: Any, eventTypes: int, eventSet: Any) -> None:
    unit, gpu = _ask(handle)
    if unit is not gpu:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    eventSet.append(gpu["uuid"])


def nvmlEventSetWait_v2(eventSet: Any, timeoutms: int) -> Any:
    machine = _machine()
    _hang(machine)
    mine = [event for event in machine.get("events", ()) if event[0] in eventSet]
    if len(mine) <= eventSet.given:
        raise NVMLError(NVML_ERROR_TIMEOUT)
    uuid, xid = mine[eventSet.given]
    eventSet.given += 1
    return SimpleNamespace(device=_handle(uuid), eventType=nvmlEventTypeXidCriticalError, eventData=xid)
