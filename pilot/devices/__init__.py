"""Which devices this pilot has: what the batch system granted, and nothing more."""

from __future__ import annotations

from stoker.errors import ConfigError
from stoker.manager.protocol.ids import DeviceId
from stoker.pilot.devices import cpu, gpu
from stoker.pilot.devices.device import Device

__all__ = ["Device", "find_devices"]


def find_devices(wanted: str = "auto") -> tuple[Device, ...]:
    """The devices to offer. `auto`: the GPUs that were granted, or one CPU device a core where there is none.

    `cpu` and `cpu:N` ask for CPU devices (one a core, or N of them), `gpu` for GPUs and nothing else.
    Raises ConfigError when what was asked for is not here.
    """
    kind, _, count = wanted.strip().partition(":")
    if kind == "cpu" and (not count or (count.isdecimal() and int(count) > 0)):
        return cpu.find(int(count or 0))
    if count or kind not in ("auto", "gpu"):
        raise ConfigError(f"--devices {wanted!r}: write auto, gpu, cpu, or cpu:N with N at least 1", key="devices")
    found, why = gpu.find()
    if found:
        return share_cores(found)
    if kind == "gpu":
        raise ConfigError(f"--devices gpu: no GPU was granted to this pilot: {why}", key="devices")
    return cpu.find()


def share_cores(gpus: tuple[Device, ...]) -> tuple[Device, ...]:
    """Give each GPU its part of this pilot's cores."""
    cores = cpu.cores()
    parts = cpu.divide(cores, len(gpus))
    return tuple(device.with_cores(part) for device, part in zip(gpus, parts, strict=True))


def visible(devices: tuple[Device, ...]) -> dict[str, str]:
    """The environment that shows these devices, and no others, to a library process."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(device.cuda for device in devices if device.cuda)}


def named(devices: tuple[Device, ...]) -> dict[DeviceId, Device]:
    """Devices by id."""
    return {device.facts.device: device for device in devices}
