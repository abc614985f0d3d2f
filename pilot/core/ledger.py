"""The device memory that a pilot holds for its libraries.

The manager keeps its own ledger of what each library should come to hold, its budget; this one is what is *held*,
and it has the last word: an order that does not fit yet waits (`stoker.pilot.core.station`). A reservation is the same
number of bytes on each device of a library. It shrinks only when the library says that it has really shrunk, so that
growing elsewhere waits until the memory is free (docs/decisions/050).
"""

from __future__ import annotations

from stoker.protocol.ids import DeviceId, LibraryId
from stoker.units import show_bytes


class Ledger:
    """Reservations of libraries on devices, in bytes. Nothing is ever held twice or below zero."""

    def __init__(self, devices: dict[DeviceId, int]) -> None:
        self.capacity = dict(devices)
        self._held: dict[LibraryId, tuple[tuple[DeviceId, ...], int]] = {}
        self._free = dict(devices)
        self.has_freed = False
        """Whether something was given back since the station looked last."""

    def why_never(self, devices: tuple[DeviceId, ...], memory_bytes: int) -> str:
        """Why this reservation could not be made if nothing else were held, in words; empty when it could."""
        unknown = [device for device in devices if device not in self.capacity]
        if unknown:
            return f"this pilot has no device {unknown[0]}; it has {', '.join(self.capacity)}"
        if not devices or len(set(devices)) != len(devices):
            return "a library needs one device or several different ones"
        if memory_bytes < 0:
            return f"{memory_bytes} bytes cannot be reserved"
        for device in devices:
            if memory_bytes > self.capacity[device]:
                capacity = show_bytes(self.capacity[device])
                return f"{device} has {capacity} in all, {show_bytes(memory_bytes)} are needed"
        return ""

    def why_not(self, devices: tuple[DeviceId, ...], memory_bytes: int) -> str:
        """Why this reservation cannot be made now, in words; empty when it can."""
        never = self.why_never(devices, memory_bytes)
        if never:
            return never
        for device in devices:
            if memory_bytes > self._free[device]:
                free, capacity = self._free[device], self.capacity[device]
                needed = show_bytes(memory_bytes)
                return f"{device} has {show_bytes(free)} of {show_bytes(capacity)} free, {needed} are needed"
        return ""

    def reserve(self, library: LibraryId, *, devices: tuple[DeviceId, ...], memory_bytes: int) -> None:
        """Hold `memory_bytes` on each of `devices`. Raises ValueError, and holds nothing, where it does not fit."""
        again = f"library {library} already holds memory" if library in self._held else ""
        reason = again or self.why_not(devices, memory_bytes)
        if reason:
            raise ValueError(reason)
        for device in devices:
            self._free[device] -= memory_bytes
        self._held[library] = (devices, memory_bytes)

    def resize(self, library: LibraryId, *, memory_bytes: int) -> None:
        """Change what a library holds on each of its devices. Raises ValueError, and changes nothing."""
        if library not in self._held:
            raise ValueError(f"library {library} holds nothing here")
        devices, before = self._held[library]
        reason = self.why_not(devices, max(0, memory_bytes - before)) if memory_bytes >= 0 else "a negative size"
        if reason:
            raise ValueError(reason)
        for device in devices:
            self._free[device] -= memory_bytes - before
        self.has_freed |= memory_bytes < before
        self._held[library] = (devices, memory_bytes)

    def release(self, library: LibraryId) -> None:
        """Hold nothing for this library any more; one that holds nothing is fine."""
        devices, memory_bytes = self._held.pop(library, ((), 0))
        self.has_freed = True
        for device in devices:
            self._free[device] += memory_bytes

    def free(self, device: DeviceId) -> int:
        """Bytes of a device that nobody holds."""
        return self._free[device]

    def held(self, library: LibraryId) -> int:
        """Bytes that a library holds on each of its devices."""
        return self._held.get(library, ((), 0))[1]

    def validate(self) -> None:
        """Raise ValueError if the sums do not add up: for tests and the simulator."""
        for device, capacity in self.capacity.items():
            held = sum(size for devices, size in self._held.values() if device in devices)
            if held + self._free[device] != capacity or self._free[device] < 0:
                raise ValueError(f"{device}: {held} held and {self._free[device]} free of {capacity}")
