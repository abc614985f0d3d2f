"""Spare cores: CPU devices of a pilot beside its GPUs, where the site file says so (`devices = "gpu+cpu:1"`).

Each GPU keeps the first cores of its even part of the pilot's cores, so that they stay as near to it as they are
without spare cores. The agent runs on the GPUs' cores as well (`kept_cores`): a model that computes on the spare ones
does not hold up heartbeats and transfers. Of host memory as much is kept as the GPUs have, through which their models
are loaded, but at most half; the CPU devices share the rest.
"""

from __future__ import annotations

from stoker.pilot.devices import cpu
from stoker.pilot.devices.device import PilotDevice

_MOST_KEPT = 0.5
"""Of host memory, for what runs on GPUs."""


def share(gpus: tuple[PilotDevice, ...], *, count: int, gpu_cores: int) -> tuple[tuple[PilotDevice, ...], str]:
    """GPUs with `gpu_cores` cores each, then `count` CPU devices of the other cores (0 = one a core). Where no core is
    left: the GPUs alone, which share all cores, and why in words."""
    mine = cpu.cores()
    parts = cpu.divide(mine, len(gpus))
    if len(mine) <= gpu_cores * len(gpus):
        why = (
            f"no core is left for CPU devices: the pilot has {len(mine)} and keeps {gpu_cores} for each of"
            f" {len(gpus)} GPU{'s' * (len(gpus) != 1)}; ask for more ([provider] cores), or lower [pilot] gpu_cores"
        )
        return tuple(gpu.with_cores(part) for gpu, part in zip(gpus, parts, strict=True)), why
    kept = tuple(gpu.with_cores(part[:gpu_cores]) for gpu, part in zip(gpus, parts, strict=True))
    left = tuple(core for part in parts for core in part[gpu_cores:])
    memory = int(cpu.USED_SHARE * cpu.memory_bytes())
    for_gpus = min(sum(gpu.facts.memory_bytes for gpu in gpus), int(_MOST_KEPT * memory))
    return kept + cpu.share(left, count, memory_bytes=memory - for_gpus, spare=True), ""


def kept_cores(devices: tuple[PilotDevice, ...]) -> frozenset[int]:
    """The cores that no CPU device has where there are spare cores; empty: there are none."""
    if not any(device.facts.spare for device in devices):
        return frozenset()
    return frozenset(core for device in devices if not device.facts.spare for core in device.cores)
