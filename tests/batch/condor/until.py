"""Waiting for a pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from polling import PATIENCE_S


def until(true: Callable[[], Any], *, seconds: float = PATIENCE_S, what: str = "it") -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(0.03)
    raise AssertionError(f"{what} did not happen within {seconds} s")
