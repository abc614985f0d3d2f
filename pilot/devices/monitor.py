"""Watches GPUs through NVML, in one thread per GPU: a driver that hangs blocks only its thread.

Most Xids (13, 31, 43, 45, ...) are faults of programs; those below are faults of the GPU or its link (NVIDIA's "XID
Errors"). A lost GPU answers every question with GPU_IS_LOST, so events are matched by handle.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from stoker.pilot.devices import gpu
from stoker.pilot.devices.cpu import PilotDevice
from stoker.pilot.devices.gpu import DRIVER_LIMIT_S

# ---- health

XIDS = {
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
_UNKNOWN_TIMES = 3  # number of "Unknown Error" answers in a row that are a fault: some drivers say that of a lost GPU


class Health:
    """Watches one GPU, or the whole GPU of a MIG part. A driver that cannot answer counts as healthy."""

    def __init__(self, handle: Any, *, nvml: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._address = gpu.address_of(handle)
        self._events: Any = None
        self._errors: int | None = None
        self._unknown = 0
        try:
            self._uuid = gpu.uuid_of(nvml, handle)
        except nvml.NVMLError:
            self._uuid = ""
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events
        except nvml.NVMLError:  # old drivers, containers without the right, a GPU that is lost
            pass

    def fault(self) -> str:
        """The fault since the last call; empty without a fault."""
        return self._xid() or self._lost() or self._new_errors()

    def _xid(self) -> str:
        nvml = self._nvml
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if gpu.is_error(nvml, error, *gpu.LOST_CODES):
                    return f"the driver says: {error}"
                return ""  # nothing has happened
            if event.eventData in XIDS and self._is_mine(event.device):
                return f"the driver reported Xid {event.eventData} ({XIDS[event.eventData]})"
        return ""

    def _is_mine(self, handle: Any) -> bool:
        if self._address and gpu.address_of(handle) == self._address:
            return True
        try:
            return not self._uuid or gpu.uuid_of(self._nvml, handle) == self._uuid
        except self._nvml.NVMLError:
            return True

    def _lost(self) -> str:
        """That it no longer answers: every GPU that works can tell its memory, or says that it cannot."""
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except nvml.NVMLError as error:
            if gpu.is_error(nvml, error, *gpu.LOST_CODES):
                return f"the driver says: {error}"
            self._unknown += gpu.is_error(nvml, error, "NVML_ERROR_UNKNOWN")
            return f"the driver says: {error}" if self._unknown >= _UNKNOWN_TIMES else ""
        self._unknown = 0
        return ""

    def _new_errors(self) -> str:
        nvml = self._nvml
        try:
            errors = int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    self._handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        except nvml.NVMLError as error:
            return f"the driver says: {error}" if gpu.is_error(nvml, error, *gpu.LOST_CODES) else ""
        before, self._errors = self._errors, errors
        new = errors - before if before is not None else 0  # those from before this pilot are not its own
        return f"it had {new} uncorrectable memory errors (ECC)" if new > 0 else ""


# ---- monitors

log = logging.getLogger("stoker.pilot")

EVERY_S = 1.0


class Reading(msgspec.Struct, frozen=True):
    """A GPU's memory in bytes at a monotonic time, by process id as the driver counts (None = unknown), and in all
    (-1)."""

    by_process: dict[int, int | None] | None
    taken_bytes: int = -1
    at: float = 0.0


class Monitor:
    """Watches one GPU until `close`."""

    def __init__(
        self, device: PilotDevice, *, nvml: Any, limit_s: float = DRIVER_LIMIT_S, every_s: float = EVERY_S
    ) -> None:
        self._uuid = device.uuid
        self._nvml = nvml
        self._limit_s = limit_s
        self._every_s = every_s
        self._handle: Any = None
        self._health: Health | None = None
        self._reading: Reading | None = None
        self._fault = ""
        self._asked_at: float | None = None  # since when the thread waits for the driver; None while it does not
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{device.facts.device}", daemon=True)
        self._thread.start()

    @property
    def reading(self) -> Reading | None:
        """The last reading; None before the first, and where NVML cannot tell."""
        return self._reading

    def take_fault(self) -> str:
        """The driver's report since the last call; empty without a report."""
        fault, self._fault = self._fault, ""
        return fault

    def hangs(self, now: float) -> str:
        """The message about a driver that has not answered for too long; empty while it answers. `now`: monotonic."""
        asked_at = self._asked_at
        if asked_at is None or now - asked_at < self._limit_s:
            return ""
        return f"the NVIDIA driver has not answered for {self._limit_s:g} s"

    def close(self) -> None:
        """Have the thread end; it is not waited for, since it may hang."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self._asked_at = time.monotonic()
            try:
                self._measure()
            except self._nvml.NVMLError:  # no driver any more, or no such GPU: its fault has been noted
                self._reading = None
            except Exception:  # a pynvml that lacks what is asked for here
                self._reading = None
                log.exception("%s cannot be watched through NVML", self._uuid)
                return
            finally:
                self._asked_at = None
            self._over.wait(self._every_s)

    def _measure(self) -> None:
        nvml = self._nvml
        if self._handle is None:
            nvml.nvmlInit()
            self._handle = self._find()
            self._health = Health(self._whole(), nvml=nvml)
        assert self._health is not None
        fault = self._health.fault()
        if fault:
            self._fault = fault
        self._reading = self._read()

    def _find(self) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except nvml.NVMLError as error:
            if gpu.is_error(nvml, error, *gpu.LOST_CODES):
                self._fault = f"the driver says: {error}"
            raise

    def _whole(self) -> Any:
        nvml = self._nvml
        if not self._uuid.startswith("MIG-"):
            return self._handle
        try:
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
        except nvml.NVMLError:
            return self._handle

    def _read(self) -> Reading:
        nvml, taken = self._nvml, -1
        by_process: dict[int, int | None] | None = None
        at = time.monotonic()
        with suppress(nvml.NVMLError):
            info = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            taken = int(info.total) - int(info.free)
        with suppress(nvml.NVMLError):
            running = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            by_process = {process.pid: process.usedGpuMemory for process in running}
        return Reading(by_process, taken, at)


def watch(devices: tuple[PilotDevice, ...], *, nvml: Any = None, limit_s: float = DRIVER_LIMIT_S) -> dict[str, Monitor]:
    """Return a monitor for each GPU, by its UUID; empty without NVML."""
    nvml = nvml or gpu.load_nvml()
    gpus = [device for device in devices if device.uuid]
    if nvml is None:
        return {}
    return {device.uuid: Monitor(device, nvml=nvml, limit_s=limit_s) for device in gpus}
