"""How tests wait for something to become true: often at first, then less, so that many that wait leave the cores to
those that are waited for (to look through all processes takes milliseconds)."""

from __future__ import annotations

import time
from collections.abc import Iterator

PATIENCE_S = 60.0
"""How long tests wait for what takes a moment on a quiet machine."""


def polls(limit_s: float, *, longest_s: float = 0.05) -> Iterator[bool]:
    """True for each look that another may follow, with a pause after it; False for the last, after `limit_s`."""
    end, pause_s = time.monotonic() + limit_s, 0.005
    while time.monotonic() < end:
        yield True
        time.sleep(pause_s)
        pause_s = min(longest_s, 1.4 * pause_s)
    yield False
