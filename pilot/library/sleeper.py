"""Puts a library's context to sleep and wakes it with the context's `sleep()` and `wake()`; measures memory."""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from stoker.pilot.library.connection import Settings
from stoker.pilot.library.functions import clean
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.to_agent import SleepFailed, Slept, Woke

_TAIL_LINES = 20


class Sleeper:
    def __init__(self, context: Any, *, name: str, devices: tuple[str, ...], settings: Settings) -> None:
        self._context = context
        self._name = name
        self._devices = devices
        self._settings = settings

    def sleep(self) -> Slept | SleepFailed:
        before, began = host_memory()[0], time.monotonic()
        try:
            self._context.sleep()
        except BaseException as error:
            return self._failed("sleep", error)
        seconds = time.monotonic() - began
        gc.collect()
        _return_freed_memory()
        resident = host_memory()[0]
        return Slept(resident, max(0, resident - before), device_memory(self._devices), seconds)

    def wake(self) -> Woke | SleepFailed:
        began = time.monotonic()
        try:
            self._context.wake()
        except BaseException as error:
            return self._failed("wake", error)
        seconds = time.monotonic() - began
        _return_freed_memory()  # an awake library has a lower limit of host memory
        return Woke(seconds)

    def _failed(self, method: str, error: BaseException) -> SleepFailed:
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # into the library's log
        own = self._settings
        failure = Failure(
            kind=FailureKind.CONTEXT,
            message=clean(f"{method}() of the context {self._name} raised {type(error).__name__}: {error}"),
            pilot=own.pilot,
            library=own.library,
            tail=clean("\n".join(text.splitlines()[-_TAIL_LINES:])),
            log=own.log,
        )
        return SleepFailed(failure)


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


def _return_freed_memory() -> None:
    """Return unused memory from the allocators to the device and the operating system."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
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
    return found["VmRSS:"], max(found["VmHWM:"], found["VmRSS:"])


def device_memory(devices: tuple[str, ...]) -> int:
    """Return the bytes that PyTorch has reserved on the fullest device, or 0 without a GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return max(
        (int(torch.cuda.memory_reserved(index)) for index in range(min(len(devices), torch.cuda.device_count()))),
        default=0,
    )
