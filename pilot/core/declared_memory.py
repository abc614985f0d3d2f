"""What a recipe declares of a device. The manager reserves it, and the pilot weighs offers by it: one rule for both, so
that a pilot never wants more for a call than the manager could reserve.
"""

from __future__ import annotations

from stoker.contexts.recipe import Needs
from stoker.protocol.to_manager import DeviceFacts


def declared_bytes(needs: Needs, facts: DeviceFacts) -> int:
    """What a recipe declares of such a device in bytes; 0 if nothing.

    On a CPU device host memory is the device's memory. On a GPU device memory alone counts, and what the device takes
    for each process comes on top, as far as it is there: a user who declares all of a GPU means the GPU.
    """
    memory, device_memory = needs.memory_bytes, needs.device_memory_bytes
    if facts.on_host:
        return max(memory, device_memory)
    if not device_memory or device_memory > facts.memory_bytes:
        return device_memory
    if takes_one_process(facts):
        return facts.memory_bytes
    return min(device_memory + facts.process_bytes, facts.memory_bytes)


def takes_one_process(facts: DeviceFacts) -> bool:
    """True if a second process on the device would fail: a GPU whose compute mode is EXCLUSIVE_PROCESS."""
    return facts.processes == 1
