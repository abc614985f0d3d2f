"""A driver for nodes that have none: pynvml as the pilots of a test see it, with four GPUs on whatever node it runs.

What Slurm grants are links to /dev/null. Where a test wants pilots to find devices, this folder is the first on their
path.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What every call raises that this driver does not know."""


def nvmlInit() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return 4


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{os.environ.get('SLURMD_NODENAME', 'none')}-{handle}"


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA A10"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=24 * 10**9)


def __getattr__(name: str) -> Any:
    def unknown(*_: Any) -> None:
        raise NVMLError(f"{name} is not supported")

    return unknown if name.startswith("nvml") else 0
