"""The devices that the batch system granted to this pilot."""

from __future__ import annotations

from stoker.errors import ConfigError
from stoker.pilot.devices import cpu, gpu
from stoker.pilot.devices.cpu import GrantedDevices, PilotDevice
from stoker.site import GPU_CORES

__all__ = ["GrantedDevices", "PilotDevice", "find_devices"]


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
        return GrantedDevices(cpu.find_cpu_devices(int(count or 0)))
    if kind not in ("auto", "gpu", "gpu+cpu"):
        raise ConfigError(
            f"--devices {wanted!r}: write auto, gpu, cpu, cpu:N with N at least 1, gpu+cpu, or gpu+cpu:N", key="devices"
        )
    found = gpu.find_gpus(limit_s=limit_s)
    asked = f"the job requested {gpus_asked} GPU{'s' * (gpus_asked != 1)}, but the pilot found"
    if found.offered:
        troubles = found.troubles
        if not troubles and len(found.offered) < gpus_asked:
            troubles = (f"{asked} {len(found.offered)}",)
        if kind == "gpu+cpu":
            offered, lack = cpu.add_spare_cpu_devices(found.offered, count=int(count or 0), gpu_cores=gpu_cores)
            return GrantedDevices(offered, (*troubles, lack) if lack else troubles)
        parts = cpu.divide_cores(cpu.find_usable_cores(), len(found.offered))
        offered = tuple(device.with_cores(part) for device, part in zip(found.offered, parts, strict=True))
        return GrantedDevices(offered, troubles)
    if kind != "auto":
        raise ConfigError(f"--devices {wanted}: no GPU was granted to this pilot: {found.lacks}", key="devices")
    if gpus_asked:
        lacks = f'{asked} none ({found.lacks}); set [pilot] devices = "cpu" to use its cores'
        return GrantedDevices(cpu.find_cpu_devices()).with_fault(lacks)
    return GrantedDevices(cpu.find_cpu_devices(), found.troubles)


def visibility_variables(devices: tuple[PilotDevice, ...]) -> dict[str, str]:
    """Return the environment variables that make only these devices visible to a library."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices if device.uuid)}
