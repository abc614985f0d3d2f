from __future__ import annotations

from typing import Any


def gpu(uuid: str, name: str, *, memory_mb: int = 24_000, capability: float = 8.6) -> dict[str, Any]:
    """Describe a GPU. `uuid` is short, as HTCondor prints it: `GPU-c4a646d7`."""
    return {"uuid": uuid, "name": name, "memory_mb": memory_mb, "capability": capability}


def machine(
    name: str, *gpus: dict[str, Any], cpus: int = 8, memory_mb: int = 32_000, disk_mb: int = 100_000,
    **more: str,
) -> dict[str, Any]:  # fmt: skip
    return {
        "name": name, "gpus": list(gpus), "cpus": cpus, "memory_mb": memory_mb, "disk_mb": disk_mb,
        "domain": f"{name}.pool", "more": more,
    }  # fmt: skip
