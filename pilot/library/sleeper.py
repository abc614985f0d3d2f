"""Puts a library's context to sleep and wakes it with the context's `sleep()` and `wake()`; measures memory."""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import time
from contextlib import suppress
from typing import Any

from stoker.pilot.library.connection import Settings, print_exception
from stoker.protocol.calls import FailureKind
from stoker.protocol.to_agent import SleepFailed, Slept, Woke
from stoker.protocol.to_library import Sleep, Wake


def move_context(
    order: Sleep | Wake, *, context: Any, name: str, devices: tuple[str, ...], settings: Settings
) -> Slept | Woke | SleepFailed:
    method = "sleep" if isinstance(order, Sleep) else "wake"
    before, began = host_memory()[0], time.monotonic()
    try:
        getattr(context, method)()
    except BaseException as error:
        what = f"{method}() of the context {name} raised {type(error).__name__}: {error}"
        return SleepFailed(settings.failure(FailureKind.CONTEXT, what, tail=print_exception(error)))
    seconds = time.monotonic() - began
    gc.collect()
    _return_freed_memory()  # also when awake, because an awake library has a lower limit of host memory
    if isinstance(order, Wake):
        return Woke(seconds)
    resident = host_memory()[0]
    return Slept(resident, max(0, resident - before), device_memory(devices), seconds)


def can_sleep(context: Any) -> bool:
    """Return True if a context's class has methods `sleep()` and `wake()` without required arguments."""
    return all(_has_method_without_arguments(context, name) for name in ("sleep", "wake"))


def _has_method_without_arguments(context: Any, name: str) -> bool:
    if not callable(getattr(type(context), name, None)):  # a proxy object has every attribute
        return False
    method = getattr(context, name)
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):  # an argument is required, or C code has no signature
        return False
    return not inspect.iscoroutinefunction(method)


def _cuda() -> Any:
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _return_freed_memory() -> None:
    """Return unused memory from the allocators to the device and the operating system."""
    if cuda := _cuda():
        cuda.empty_cache()
    with suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def host_memory() -> tuple[int, int]:
    """Return the current and the peak host memory of this process, in bytes."""
    found = {"VmRSS:": 0, "VmHWM:": 0}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition("\t")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return found["VmRSS:"], max(found.values())


def device_memory(devices: tuple[str, ...]) -> int:
    """Return the bytes that PyTorch has reserved on the fullest device, or 0 without a GPU."""
    cuda = _cuda()
    count = min(len(devices), cuda.device_count()) if cuda else 0
    return max((int(cuda.memory_reserved(index)) for index in range(count)), default=0)
