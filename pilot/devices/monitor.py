"""Watches GPUs through NVML, and the host's memory after the kernel killed a library.

Most Xids (13, 31, 43, 45, ...) are faults of programs. The Xids in `GPU_FAULT_XIDS` are faults of the GPU or its link
(NVIDIA's "XID Errors"). In a container, NVML may report process ids of another PID namespace. The pilot uses these ids
only if all of them belong to its processes. Otherwise, if a library is alone on a GPU, all memory that was allocated
since the GPU was empty counts as the library's memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.pilot.core.events import MemoryShortage
from stoker.pilot.devices import gpu
from stoker.pilot.devices.cpu import PilotDevice, cgroup_folders, read_number_from_file, read_value

# ---- memory of GPUs

_FIRST_NAMESPACE = "pid:[4026531836]"  # Linux's initial PID namespace (PROC_PID_INIT_INO), equal on all machines
_K = TypeVar("_K")


def sees_all_processes() -> bool:
    """True if this process runs in the node's initial PID namespace."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def divide_gpu_memory_by_library(
    bytes_by_process: Mapping[int, int | None] | None,
    processes: Mapping[_K, Collection[int]],
    *,
    used_bytes: int,
    empty_gpu_bytes: int,
    are_pids_reliable: bool,
) -> dict[_K, int]:
    ours = {pid for pids in processes.values() for pid in pids}
    if bytes_by_process and (are_pids_reliable or ours >= bytes_by_process.keys()):
        return {
            library: sum(bytes_by_process[pid] or 0 for pid in pids if pid in bytes_by_process)
            for library, pids in processes.items()
            if all(bytes_by_process.get(pid, 0) is not None for pid in pids)
        }
    if are_pids_reliable and bytes_by_process is not None:
        return dict.fromkeys(processes, 0)
    if len(processes) == 1 and used_bytes >= 0 and empty_gpu_bytes >= 0:
        return {library: max(0, used_bytes - empty_gpu_bytes) for library in processes}
    return {}


# ---- memory of the host

KILL_EXPLAINS_S = 5.0  # seconds after an out-of-memory kill during which the kill explains a library's death


class OomKillDetector:
    """Detects recent out-of-memory kills by the kernel. `own_bytes`: the pilot's memory use; None = unknown."""

    def __init__(
        self,
        own_bytes: Callable[[], int | None],
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own_bytes = own_bytes
        self._root = root
        self._clock = clock
        self._count = self._read_kill_count()
        self._noticed_at = -KILL_EXPLAINS_S

    def check_for_kills(self) -> None:
        count = self._read_kill_count()
        if count > self._count:
            self._noticed_at = self._clock()
        self._count = count

    def measure_shortage(self) -> MemoryShortage | None:
        """Return the shortage at the tightest limit; None if no kill is recent or the pilot's own memory is unknown."""
        self.check_for_kills()
        if self._clock() - self._noticed_at >= KILL_EXPLAINS_S:
            return None
        own = self._own_bytes()
        if own is None:
            return None
        levels = [
            MemoryShortage(limit - used - shared, max(0, used - own)) for limit, used, shared in self._memory_limits()
        ]
        return min(levels, key=lambda level: level.room_bytes, default=None)

    def _read_kill_count(self) -> int:
        return read_value(self._root / "proc/vmstat", "oom_kill")

    def _memory_limits(self) -> Iterator[tuple[int, int, int]]:
        info = self._root / "proc/meminfo"
        total, shared = read_value(info, "MemTotal:") * 1024, read_value(info, "Shmem:") * 1024
        if total:
            yield total, max(0, total - read_value(info, "MemAvailable:") * 1024 - shared), shared
        for folder in cgroup_folders(self._root, "memory"):
            facts = folder / "memory.stat"
            if (limit := read_number_from_file(folder / "memory.max")) and (not total or limit < total):
                yield limit, read_value(facts, "anon"), read_value(facts, "shmem")
            elif (limit := read_number_from_file(folder / "memory.limit_in_bytes")) and (not total or limit < total):
                yield limit, read_value(facts, "total_rss"), read_value(facts, "total_shmem")


def anonymous_bytes(pids: Iterator[int]) -> int | None:
    """Return the proportional set size (PSS) of the processes' anonymous memory; None if unknown."""
    total = 0
    for pid in pids:
        held = read_value(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon:", none=-1)
        if held < 0:
            if read_value(Path(f"/proc/{pid}/status"), "VmSize:") > 0:  # the process has not ended
                return None
            continue
        total += held * 1024
    return total


# ---- health

GPU_FAULT_XIDS = {
    48: "a double-bit memory error",
    62: "its controller halted",
    64: "a bad memory row could not be replaced",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "a memory error that could not be recovered",
}
_UNKNOWN_ERROR_LIMIT = 3  # fault after 3 "Unknown Error" answers in a row, which some drivers return for a lost GPU


class GpuHealth:
    """Watches one GPU with all its MIG parts. If the driver cannot report faults, the GPU counts as healthy."""

    def __init__(self, handle: Any, *, nvml: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._events: Any = None
        self._errors: int | None = None
        self._unknown = 0
        with suppress(nvml.NVMLError):  # an old driver, a container without permission, or a lost GPU
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def find_fault(self) -> str:
        return self._describe_xid_error() or self._describe_lost_gpu() or self._describe_new_ecc_errors()

    def _describe_xid_error(self) -> str:
        nvml = self._nvml
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:  # usually because no event has occurred
                return gpu.describe_if_lost(nvml, error)
            if event.eventData in GPU_FAULT_XIDS:
                return f"the driver reported Xid {event.eventData} ({GPU_FAULT_XIDS[event.eventData]})"
        return ""

    def _describe_lost_gpu(self) -> str:
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except nvml.NVMLError as error:
            self._unknown += gpu.is_nvml_error(nvml, error, "NVML_ERROR_UNKNOWN")
            lost = f"the driver says: {error}" if self._unknown >= _UNKNOWN_ERROR_LIMIT else ""
            return gpu.describe_if_lost(nvml, error) or lost
        self._unknown = 0
        return ""

    def _describe_new_ecc_errors(self) -> str:
        nvml = self._nvml
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        try:
            errors = int(nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, counter))
        except nvml.NVMLError as error:
            return gpu.describe_if_lost(nvml, error)
        before, self._errors = self._errors, errors
        new = errors - before if before is not None else 0  # ignore errors from before the pilot's start
        return f"it had {new} uncorrectable memory errors (ECC)" if new > 0 else ""


# ---- monitors

log = logging.getLogger("stoker.pilot")

READING_INTERVAL_S = 1.0


class GpuMemoryReading(msgspec.Struct, frozen=True):
    """Used bytes of a GPU: by process id as the driver reports it (None = unknown), and in total (-1 = unknown)."""

    by_process: dict[int, int | None] | None
    taken_bytes: int = -1
    at: float = 0.0


class GpuMonitor:
    """Watches one GPU in a thread. `reading`: the last reading; None before the first reading or if NVML fails."""

    def __init__(self, device: PilotDevice, *, nvml: Any, limit_s: float) -> None:
        self.reading: GpuMemoryReading | None = None
        self._uuid = device.uuid
        self._nvml = nvml
        self._limit_s = limit_s
        self._handle: Any = None
        self._health: GpuHealth | None = None
        self._fault = ""
        self._asked_at: float | None = None  # start of the current wait for the driver; None: no wait
        self._stopped = threading.Event()
        threading.Thread(target=self._watch_gpu, name=f"watch-{device.facts.device}", daemon=True).start()

    def take_fault(self) -> str:
        """Return the fault that the driver reported since the last call; empty if none."""
        fault, self._fault = self._fault, ""
        return fault

    def describe_hang(self, now: float) -> str:
        """Return a message if the driver has not answered within the limit; empty otherwise."""
        asked_at = self._asked_at
        if asked_at is None or now - asked_at < self._limit_s:
            return ""
        return f"the NVIDIA driver has not answered for {self._limit_s:g} s"

    def close(self) -> None:
        """Stop the thread without waiting for its end, because the driver may hang."""
        self._stopped.set()

    def _watch_gpu(self) -> None:
        while not self._stopped.is_set():
            self._asked_at = time.monotonic()
            try:
                self._read_gpu()
            except self._nvml.NVMLError:  # the driver or the GPU is gone; `_read_gpu` recorded the fault
                self.reading = None
            except Exception:  # this version of pynvml lacks a function
                self.reading = None
                log.exception("%s cannot be watched through NVML", self._uuid)
                return
            finally:
                self._asked_at = None
            self._stopped.wait(READING_INTERVAL_S)

    def _read_gpu(self) -> None:
        nvml, taken = self._nvml, -1
        if self._handle is None:
            nvml.nvmlInit()
            try:
                self._handle = whole = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            except nvml.NVMLError as error:
                self._fault = gpu.describe_if_lost(nvml, error) or self._fault
                raise
            if self._uuid.startswith("MIG-"):
                with suppress(nvml.NVMLError):
                    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
            self._health = GpuHealth(whole, nvml=nvml)
        assert self._health is not None
        self._fault = self._health.find_fault() or self._fault
        by_process: dict[int, int | None] | None = None
        at = time.monotonic()
        with suppress(nvml.NVMLError):
            info = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            taken = int(info.total) - int(info.free)
        with suppress(nvml.NVMLError):
            running = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            by_process = {process.pid: process.usedGpuMemory for process in running}
        self.reading = GpuMemoryReading(by_process, taken, at)


def start_monitors(devices: tuple[PilotDevice, ...], *, limit_s: float) -> dict[str, GpuMonitor]:
    """Return a monitor for each GPU by UUID; empty without NVML."""
    nvml = gpu.load_nvml()
    gpus = [device for device in devices if device.uuid and nvml is not None]
    return {device.uuid: GpuMonitor(device, nvml=nvml, limit_s=limit_s) for device in gpus}
