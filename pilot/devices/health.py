"""What the driver itself says of a GPU's health, through NVML: memory errors that it could not correct, Xid events, and
that the GPU is lost.

Most Xids (13, 31, 43, 45, ...) are faults of programs and say nothing of the device; those below are faults of the GPU
or its link, after which it computes wrongly or not at all until somebody resets it (NVIDIA's "XID Errors" document).
A GPU that has fallen off the bus answers every question with GPU_IS_LOST, the question for its own name too: so events
are matched by handle, and each answer of that kind is the fault itself.
"""

from __future__ import annotations

from typing import Any

from stoker.pilot.devices import nvml as names

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
_UNKNOWN_TIMES = 3
"""So many answers "Unknown Error" in a row are a fault: some drivers say that of a GPU that is lost."""


class Health:
    """Watches one GPU, or the GPU of a MIG part. A driver that cannot tell counts as having nothing to tell.

    `handle` is of the whole GPU: a MIG part has neither events nor error counts of its own.
    """

    def __init__(self, handle: Any, *, nvml: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._address = names.address_of(handle)
        self._events: Any = None
        self._errors: int | None = None
        self._unknown = 0
        try:
            self._uuid = names.uuid_of(nvml, handle)
        except nvml.NVMLError:
            self._uuid = ""
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events
        except nvml.NVMLError:  # old drivers, containers without the right, a GPU that is lost
            pass

    def fault(self) -> str:
        """What has gone wrong since the last time; empty if nothing has."""
        return self._xid() or self._lost() or self._new_errors()

    def _xid(self) -> str:
        nvml = self._nvml
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if names.is_error(nvml, error, *names.LOST_CODES):
                    return f"the driver says: {error}"
                return ""  # nothing has happened
            if event.eventData in XIDS and self._is_mine(event.device):
                return f"the driver reported Xid {event.eventData} ({XIDS[event.eventData]})"
        return ""

    def _is_mine(self, handle: Any) -> bool:
        """True unless an event is certainly of another GPU: only this one was registered for."""
        if self._address and names.address_of(handle) == self._address:
            return True
        try:
            return not self._uuid or names.uuid_of(self._nvml, handle) == self._uuid
        except self._nvml.NVMLError:
            return True

    def _lost(self) -> str:
        """That it no longer answers: every GPU that works can tell its memory, or says that it cannot."""
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except nvml.NVMLError as error:
            if names.is_error(nvml, error, *names.LOST_CODES):
                return f"the driver says: {error}"
            self._unknown += names.is_error(nvml, error, "NVML_ERROR_UNKNOWN")
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
            return f"the driver says: {error}" if names.is_error(nvml, error, *names.LOST_CODES) else ""
        before, self._errors = self._errors, errors
        new = errors - before if before is not None else 0  # those from before this pilot are not its own
        return f"it had {new} uncorrectable memory errors (ECC)" if new > 0 else ""
