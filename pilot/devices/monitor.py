"""Watches GPUs through NVML in threads of their own, one a GPU: a driver that hangs holds up nothing but its thread.

The agent's loop only reads what a thread has left behind. A thread that has waited for the driver for `limit_s` means
that the GPU, or its driver, hangs: that is a fault of the device, and of no other.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from stoker.pilot.devices import nvml as names
from stoker.pilot.devices.device import PilotDevice
from stoker.pilot.devices.gpu import DRIVER_LIMIT_S
from stoker.pilot.devices.health import Health

log = logging.getLogger("stoker.pilot")

EVERY_S = 1.0


class Reading(msgspec.Struct, frozen=True):
    """What a GPU's memory held at one moment. Sizes in bytes.

    `by_process`: memory by process id as the driver counts processes; None = the driver does not tell (of that one).
    `taken_bytes`: memory in use by any process, or by the driver; -1 = the driver does not tell. `at`: monotonic time
    of the question.
    """

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
        self._asked_at: float | None = None
        """Since when the thread waits for the driver; None while it does not."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{device.facts.device}", daemon=True)
        self._thread.start()

    @property
    def reading(self) -> Reading | None:
        """The last reading; None before the first, and where NVML cannot tell."""
        return self._reading

    def take_fault(self) -> str:
        """What the driver has reported since this was asked last; empty if nothing."""
        fault, self._fault = self._fault, ""
        return fault

    def hangs(self, now: float) -> str:
        """What to say of a driver that has not answered for too long; empty while it answers. `now`: monotonic."""
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
            if names.is_error(nvml, error, *names.LOST_CODES):
                self._fault = f"the driver says: {error}"
            raise

    def _whole(self) -> Any:
        """The GPU itself, of a MIG part too."""
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
    """A monitor for each GPU, by its UUID; none where there is no NVML."""
    nvml = nvml or names.load()
    gpus = [device for device in devices if device.uuid]
    if nvml is None:
        return {}
    return {device.uuid: Monitor(device, nvml=nvml, limit_s=limit_s) for device in gpus}
