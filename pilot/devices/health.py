"""What the driver itself says of a GPU's health, through NVML: memory errors that it could not correct, and Xid events.

Most Xids (13, 31, 43, 45, ...) are faults of programs and say nothing of the device; those below are faults of the GPU
or its link, after which it computes wrongly or not at all until somebody resets it (NVIDIA's "XID Errors" document).
"""

from __future__ import annotations

from typing import Any

from stoker.pilot.devices.device import Device

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


class Health:
    """Watches GPUs. Asking costs microseconds; a driver that cannot tell is as good as one that has nothing to tell."""

    def __init__(self, devices: tuple[Device, ...], *, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._handles: dict[str, Any] = {}
        self._errors: dict[str, int] = {}
        for device in devices:
            if device.uuid:
                self._watch(device.uuid)

    def _watch(self, uuid: str) -> None:
        nvml = self._nvml
        try:
            self._handles[uuid] = handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._events = self._events or nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:  # MIG parts, old drivers, containers without the right
            pass

    def faults(self) -> dict[str, str]:
        """What has gone wrong since the last time, by the UUID of the GPU."""
        found = dict(self._xids())
        for uuid, handle in self._handles.items():
            try:
                errors = self._uncorrected(handle)
            except self._nvml.NVMLError:
                continue
            new = errors - self._errors.get(uuid, errors)
            if new > 0:
                found.setdefault(uuid, f"it had {new} uncorrectable memory errors (ECC)")
            self._errors[uuid] = errors
        return found

    def _uncorrected(self, handle: Any) -> int:
        nvml = self._nvml
        return int(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        )

    def _xids(self) -> list[tuple[str, str]]:
        nvml, found = self._nvml, []
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = nvml.nvmlDeviceGetUUID(event.device)
            except nvml.NVMLError:  # nothing has happened
                break
            uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
            if event.eventData in XIDS:
                found.append((uuid, f"the driver reported Xid {event.eventData} ({XIDS[event.eventData]})"))
        return found
