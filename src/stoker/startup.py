"""The version of Stoker, imports on first use, and imports that Ctrl-C does not interrupt."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

RELEASE = "0.1.0"


def import_on_first_use(package: str, names: Mapping[str, str], *, home: str = "") -> Callable[[str], Any]:
    """Return a `__getattr__` that imports a package's names on first use. `names`: names in each module, separated by
    spaces. `home`: package of these modules (default: `package`).
    """
    modules = {name: f"{home or package}.{module}" for module, some in names.items() for name in some.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Do not rely on the import to bind the name: a function may have the same name as its module.
        value = getattr(import_deferring_interrupt(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


def import_deferring_interrupt(name: str) -> ModuleType:
    """Import a module. The first Ctrl-C raises KeyboardInterrupt after the import, a second Ctrl-C at once."""
    held = threading.current_thread() is threading.main_thread()
    if not held or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(name)
    pressed: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        module = importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
    return module
