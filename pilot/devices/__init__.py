"""The devices that the batch system granted to this pilot."""

from __future__ import annotations

import msgspec

from stoker.errors import ConfigError
from stoker.pilot.devices import cpu, gpu
from stoker.pilot.devices.cpu import PilotDevice
from stoker.site import GPU_CORES

__all__ = ["GrantedDevices", "PilotDevice", "find_devices"]


class GrantedDevices(msgspec.Struct, frozen=True):
    """The devices that the pilot offers, and faults of other granted devices. `lacks`: why no device can be used."""

    offered: tuple[PilotDevice, ...]
    troubles: tuple[str, ...] = ()
    lacks: str = ""

    def useless(self, why: str) -> GrantedDevices:
        return GrantedDevices(tuple(each.with_facts(fault=why) for each in self.offered), self.troubles, lacks=why)


def find_devices(
    wanted: str = "auto", *, gpus_asked: int = 0, gpu_cores: int = GPU_CORES, limit_s: float = gpu.DRIVER_LIMIT_S
) -> GrantedDevices:
    """Return the devices to offer. Raises ConfigError if the pilot has no device of the wanted kind.

        auto                  the granted GPUs, or else one CPU device per core
        cpu, cpu:N            one CPU device per core, or N devices
        gpu                   only GPUs
        gpu+cpu, gpu+cpu:N    GPUs with `gpu_cores` cores each, and CPU devices on the other cores

    If the job requested GPUs (`gpus_asked`) and got none, `auto` offers CPU devices with a fault.
    """
    kind, _, count = wanted.strip().partition(":")
    if count and not (kind.endswith("cpu") and count.isdecimal() and int(count) > 0):
        kind = ""
    if gpu_cores < 1:
        raise ConfigError(f"--gpu-cores {gpu_cores}: keep at least 1 core for each GPU", key="gpu_cores")
    if kind == "cpu":
        return GrantedDevices(cpu.find(int(count or 0)))
    if kind not in ("auto", "gpu", "gpu+cpu"):
        raise ConfigError(
            f"--devices {wanted!r}: write auto, gpu, cpu, cpu:N with N at least 1, gpu+cpu, or gpu+cpu:N", key="devices"
        )
    found = gpu.find(limit_s=limit_s)
    asked = f"the job requested {gpus_asked} GPU{'s' * (gpus_asked != 1)}, but the pilot found"
    if found.devices:
        troubles = found.left_out
        if not troubles and len(found.devices) < gpus_asked:
            troubles = (f"{asked} {len(found.devices)}",)
        if kind == "gpu+cpu":
            offered, lack = cpu.add_spare_cpu_devices(found.devices, count=int(count or 0), gpu_cores=gpu_cores)
            return GrantedDevices(offered, (*troubles, lack) if lack else troubles)
        parts = cpu.divide(cpu.cores(), len(found.devices))
        offered = tuple(device.with_cores(part) for device, part in zip(found.devices, parts, strict=True))
        return GrantedDevices(offered, troubles)
    if kind != "auto":
        raise ConfigError(f"--devices {wanted}: no GPU was granted to this pilot: {found.why}", key="devices")
    if gpus_asked:
        lacks = f'{asked} none ({found.why}); set [pilot] devices = "cpu" to use its cores'
        return GrantedDevices(cpu.find()).useless(lacks)
    return GrantedDevices(cpu.find(), found.left_out)


def visible(devices: tuple[PilotDevice, ...]) -> dict[str, str]:
    """Return the environment variables that show a library only these devices."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(device.cuda for device in devices if device.cuda)}
