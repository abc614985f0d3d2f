"""The version of Stoker, and imports that Ctrl-C does not interrupt."""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType, ModuleType

RELEASE = "0.1.0"


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
