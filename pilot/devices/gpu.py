"""Finds the GPUs that the batch system granted to this job.

`CUDA_VISIBLE_DEVICES` names GPUs by index or by the start of a UUID. As in CUDA, the list ends at the first entry that
names no GPU. Without this variable, Slurm's `SLURM_STEP_GPUS` and `SLURM_JOB_GPUS` list indices on the node. HTCondor's
`_CONDOR_AssignedGPUs` lists names like `CUDA0` or `GPU-1a2b`. A job without these variables has no GPU. Outside of a
job, all GPUs may be used. If NVML refuses a handle (NO_PERMISSION), another job owns the GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.pilot.devices.cpu import GrantedDevices, PilotDevice
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFacts

# ---- NVML

LOST_CODES = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")  # NVML errors after which a GPU needs a reset


def load_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def is_nvml_error(nvml: Any, error: BaseException, *names: str) -> bool:
    code = getattr(error, "value", None)
    return code is not None and any(code == getattr(nvml, name, None) for name in names)


def describe_if_lost(nvml: Any, error: BaseException) -> str:
    return f"the driver says: {error}" if is_nvml_error(nvml, error, *LOST_CODES) else ""


# ---- the grant

JOB_VARIABLES = {
    "SLURM_JOB_ID": "Slurm",
    "_CONDOR_SLOT": "HTCondor",
    "_CONDOR_MACHINE_AD": "HTCondor",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "SGE_TASK_ID": "Grid Engine",
}
"""Variables that batch systems set in each job, with the name of the system (`ProviderKind.title`)."""


class GpuGrant(msgspec.Struct, frozen=True):
    """The GPUs granted to this job. `of_node`: True if `names` are the node's GPU indices; `why_none`: why the batch
    system granted no GPU.
    """

    variable: str = ""
    names: tuple[str, ...] = ()
    of_node: bool = False
    why_none: str = ""


def read_gpu_grant(environ: Mapping[str, str]) -> GpuGrant:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        empty = "" if visible.strip() else "CUDA_VISIBLE_DEVICES is empty"
        return GpuGrant("CUDA_VISIBLE_DEVICES", _split_names(visible), why_none=empty)
    if "SLURM_JOB_ID" in environ:
        for variable in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
            # Slurm may write the index 0 as "gpu:0".
            names = tuple(name.rpartition(":")[2] for name in _split_names(environ.get(variable, "")))
            if names:
                return GpuGrant(variable, names, of_node=True)
    assigned = tuple(name.removeprefix("CUDA") for name in _split_names(environ.get("_CONDOR_AssignedGPUs", "")))
    if assigned:
        return GpuGrant("_CONDOR_AssignedGPUs", assigned)
    for variable, system in JOB_VARIABLES.items():
        if variable in environ:
            return GpuGrant(
                variable,
                why_none=f"{system} granted no GPU to this job (CUDA_VISIBLE_DEVICES is not set); request GPUs"
                " with [provider] gpus, or export CUDA_VISIBLE_DEVICES in worker_init if jobs get whole nodes",
            )
    return GpuGrant()


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()


# ---- GPUs

CUDA_PROCESS_BYTES = 600_000_000  # GPU memory that CUDA uses for each process: context, kernels, cuBLAS

DRIVER_LIMIT_S = 60.0  # seconds after which a driver that does not answer counts as hung

_T = TypeVar("_T")


class _GpuOrPart(msgspec.Struct, frozen=True):
    label: str
    handle: Any = None
    whole: Any = None
    uuid: str = ""
    trouble: str = ""
    is_refused: bool = False
    number: int = -1


def find_gpus(
    environ: Mapping[str, str] = os.environ, *, nvml: Any = None, limit_s: float = DRIVER_LIMIT_S
) -> GrantedDevices:
    grant = read_gpu_grant(environ)
    if grant.why_none:
        return GrantedDevices(lacks=grant.why_none)
    nvml = nvml or load_nvml()
    if nvml is None:
        return GrantedDevices(lacks="NVML missing: the pynvml module (nvidia-ml-py) is not installed")
    try:
        return call_with_time_limit(limit_s, lambda: _find_granted_gpus(nvml, grant))
    except TimeoutError:
        return GrantedDevices(lacks=f"the NVIDIA driver has not answered for {limit_s:g} s")


def call_with_time_limit(limit_s: float, function: Callable[[], _T]) -> _T:
    """Call a function in a thread. Return its result or raise its error. After `limit_s` s, raise TimeoutError."""
    answer: Future[_T] = Future()

    def work() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    # Do not use a thread pool, because it would wait for a hung driver.
    threading.Thread(target=work, name="ask-nvml", daemon=True).start()
    return answer.result(limit_s)


def _find_granted_gpus(nvml: Any, grant: GpuGrant) -> GrantedDevices:
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return GrantedDevices(lacks=f"NVML missing: no NVIDIA driver answers ({error})")
    here = [_open_gpu(nvml, index) for index in range(count)]
    devices: list[PilotDevice] = []
    left_out, wholes = [], []
    for unit in _granted_units(nvml, here, grant):
        device = _make_device(nvml, len(devices), unit)
        if isinstance(device, str):
            left_out.append(device)
        else:
            devices.append(device)
            wholes.append(unit.whole)
    islands = gpu_island_numbers(nvml, wholes)
    devices = [device.with_facts(island=island) for device, island in zip(devices, islands, strict=True)]
    why = ""
    if not devices:
        named = f"{grant.variable}={','.join(grant.names)!r} names none of the {len(here)} GPUs here"
        why = "; ".join(left_out) or (named if grant.variable else "NVML shows no GPU")
    return GrantedDevices(tuple(devices), tuple(left_out), why)


def _open_gpu(nvml: Any, index: int) -> _GpuOrPart:
    label = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        refused = is_nvml_error(nvml, error, "NVML_ERROR_NO_PERMISSION")
        return _GpuOrPart(label, trouble=f"{label} was left out: {error}", is_refused=refused)
    number = -1
    with suppress(nvml.NVMLError):
        number = int(nvml.nvmlDeviceGetMinorNumber(handle))
    try:
        return _GpuOrPart(label, handle, handle, nvml.nvmlDeviceGetUUID(handle), number=number)
    except nvml.NVMLError as error:
        return _GpuOrPart(label, trouble=f"{label} was left out: {error}", number=number)


def _mig_parts_or_gpu(nvml: Any, unit: _GpuOrPart) -> list[_GpuOrPart]:
    if unit.trouble:
        return [unit]
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(unit.handle)
        if not current:
            return [unit]
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(unit.handle)
    except nvml.NVMLError:
        return [unit]
    parts = []
    for index in range(count):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(unit.handle, index)
            label, uuid = f"MIG part {index} of {unit.label}", nvml.nvmlDeviceGetUUID(handle)
            parts.append(_GpuOrPart(label, handle, unit.handle, uuid, number=unit.number))
    none = f"{unit.label} was left out: MIG is on, and no MIG device exists"
    return parts or [msgspec.structs.replace(unit, trouble=none)]


def _granted_units(nvml: Any, node_gpus: list[_GpuOrPart], grant: GpuGrant) -> Iterator[_GpuOrPart]:
    mine = [unit for unit in node_gpus if not unit.is_refused]
    parts = [part for unit in mine for part in _mig_parts_or_gpu(nvml, unit)]
    if not grant.variable:
        yield from parts or node_gpus
        return
    if grant.of_node:
        yield from _gpus_by_node_index(node_gpus, mine, parts, grant)
        return
    seen = set()
    for name in grant.names:
        if name.isdecimal():
            whole = mine[int(name)] if int(name) < len(mine) else None
            found = _mig_parts_or_gpu(nvml, whole)[0] if whole is not None else None
        else:
            found = next((unit for unit in [*mine, *parts] if name and unit.uuid.startswith(name)), None)
            silent = next((unit for unit in node_gpus if unit.trouble and not unit.is_refused), None)
            if found is None and name.startswith(("GPU-", "MIG-")) and silent is not None:
                yield _GpuOrPart(
                    name, trouble=f"{name} was left out: no GPU that answers has this name ({silent.trouble})"
                )
                continue
        if found is None or (found.uuid or found.label) in seen:
            return
        seen.add(found.uuid or found.label)
        yield found


def _gpus_by_node_index(
    here: list[_GpuOrPart], mine: list[_GpuOrPart], parts: list[_GpuOrPart], grant: GpuGrant
) -> Iterator[_GpuOrPart]:
    """Yield the visible GPUs if their number is the granted number. Otherwise yield the GPUs whose device file or NVML
    index is granted.
    """
    for visible in (mine, parts):
        if len(visible) == len(grant.names):
            yield from visible
            return
    by_number = {unit.number: unit for unit in mine if unit.number >= 0}
    for name in grant.names:
        index = int(name) if name.isdecimal() else -1
        unit = by_number.get(index)
        if unit is None and 0 <= index < len(here) and here[index].number < 0:
            unit = here[index]
        if unit is None:
            yield _GpuOrPart(name, trouble=f"GPU {name} of the node ({grant.variable}) is not visible to this job")
        else:
            yield next((part for part in parts if part.whole is unit.handle), unit)


def _make_device(nvml: Any, index: int, unit: _GpuOrPart) -> PilotDevice | str:
    """Return the device of a GPU or MIG part, or why it is not offered."""
    if unit.trouble:
        return unit.trouble
    try:
        memory = _memory_bytes(nvml, unit.handle)
    except nvml.NVMLError as error:
        return f"{unit.label} was left out: its memory cannot be read ({error})"
    kind, mode = "NVIDIA GPU", None
    with suppress(nvml.NVMLError):
        kind = nvml.nvmlDeviceGetName(unit.handle)
    with suppress(nvml.NVMLError):
        mode = nvml.nvmlDeviceGetComputeMode(unit.whole)
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return f"{unit.label} was left out: its compute mode is PROHIBITED (nvidia-smi -c)"
    facts = DeviceFacts(
        device=DeviceId(f"cuda:{index}"),
        kind=kind,
        memory_bytes=memory,
        processes=int(mode in (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)),
        process_bytes=min(CUDA_PROCESS_BYTES, memory // 8),
    )
    return PilotDevice(facts=facts, uuid=unit.uuid)


def _memory_bytes(nvml: Any, handle: Any) -> int:
    total, reserved = int(nvml.nvmlDeviceGetMemoryInfo(handle).total), 0
    with suppress(nvml.NVMLError):  # an old driver lacks this query
        reserved = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).reserved)
    return total - reserved if 0 < reserved < total else total


# ---- groups of GPUs with fast links


def gpu_island_numbers(nvml: Any, handles: Sequence[Any], *, root: Path = Path("/")) -> list[int]:
    """Return the number of each GPU's island, from 1 (0 = unknown). GPUs connected by NVLink, or else the GPUs of one
    NUMA node, form an island.
    """
    if len(handles) < 2:
        return [0] * len(handles)
    linked = _number_nvlink_islands(nvml, handles)
    if len(set(linked)) < len(handles):
        return linked
    nodes = [_numa_node(nvml, handle, root) for handle in handles]
    return [0 if node < 0 else node + 1 for node in nodes]


def _number_nvlink_islands(nvml: Any, handles: Sequence[Any]) -> list[int]:
    found = list(range(1, len(handles) + 1))
    for one in range(len(handles)):
        for other in range(one):
            if found[one] != found[other] and _has_nvlink(nvml, handles[one], handles[other]):
                joined, kept = sorted((found[one], found[other]), reverse=True)
                found = [kept if island == joined else island for island in found]
    return found


def _has_nvlink(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:  # an old driver lacks this query
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _numa_node(nvml: Any, handle: Any, root: Path) -> int:
    try:
        address = str(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
        return int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
    except (nvml.NVMLError, OSError, ValueError):
        return -1
