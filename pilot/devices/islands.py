"""Finds groups of GPUs with fast links: NVLink, or else a common NUMA node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def gpu_island_numbers(nvml: Any, handles: Sequence[Any], *, root: Path = Path("/")) -> list[int]:
    """Return the island of each GPU as a number from 1; 0 = unknown.

    If NVLink links any two GPUs, each group of linked GPUs is an island. Otherwise, each NUMA node is an island.
    """
    if len(handles) < 2:
        return [0] * len(handles)
    linked = _linked(nvml, handles)
    if len(set(linked)) < len(handles):
        return linked
    nodes = [_numa_node(nvml, handle, root) for handle in handles]
    return [0 if node < 0 else node + 1 for node in nodes]


def _linked(nvml: Any, handles: Sequence[Any]) -> list[int]:
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
    except (nvml.NVMLError, AttributeError):  # old versions of the driver or pynvml lack this function
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _numa_node(nvml: Any, handle: Any, root: Path) -> int:
    try:
        bus = nvml.nvmlDeviceGetPciInfo(handle).busId  # older versions of pynvml return bytes
        address = (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()[-12:]
        return int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
    except (nvml.NVMLError, AttributeError, OSError, ValueError):
        return -1
