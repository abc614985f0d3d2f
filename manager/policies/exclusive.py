"""Whole devices: a library gets a device to itself, whatever its context needs.

This is what batch systems do with GPUs, and what Parsl's executors do with a worker a GPU: simple, and safe for
contexts whose memory is unknown. What it costs shows where several small contexts want a large device.
Everything else is as in `residency`: how many libraries pay, who is evicted, who has waited too long.
"""

from __future__ import annotations

from stoker.manager.core.nouns import Context, Device, Library
from stoker.manager.core.seams import View
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.manager.policies.sizes import known_bytes


class WholeDevice(LoadWhereWanted):
    """Residency: one library a device."""

    def minimum(self, context: Context, device: Device) -> int:
        """All of the device; more than that for a context that is known to be larger."""
        return max(device.facts.memory_bytes, known_bytes(context, device.facts))

    def reservation(self, context: Context, devices: tuple[Device, ...]) -> int:  # noqa: ARG002
        """All of each device (of unequal ones, of the smallest)."""
        return min(device.facts.memory_bytes for device in devices)

    def measured(self, view: View, library: Library) -> int:  # noqa: ARG002
        """What it has: nothing is given back."""
        return library.promised_bytes
