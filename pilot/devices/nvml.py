"""Names, errors and handles of NVML: what is asked of `pynvml` (nvidia-ml-py) in more than one place."""

from __future__ import annotations

import ctypes
from typing import Any

LOST_CODES = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
"""Errors that say of a GPU itself that it no longer works, until somebody resets it or restarts the node."""


def load() -> Any:
    """The `pynvml` module; None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def is_error(nvml: Any, error: BaseException, *names: str) -> bool:
    """True if NVML's error has one of these codes, such as `NVML_ERROR_NOT_SUPPORTED`."""
    code = getattr(error, "value", None)
    return code is not None and any(code == getattr(nvml, name, None) for name in names)


def uuid_of(nvml: Any, handle: Any) -> str:
    """The UUID of a GPU or of a MIG part. Raises NVMLError."""
    return text(nvml.nvmlDeviceGetUUID(handle))


def text(value: Any) -> str:
    """A string of NVML; older versions of pynvml return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def address_of(handle: Any) -> int:
    """Where a handle points to: two handles of one GPU are different objects with the same address. 0 = unknown."""
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except (TypeError, ctypes.ArgumentError):
        return 0
