"""Wait for conditions. Pauses grow, and are longer after an expensive check, so that waiting tests leave the cores to
the tested programs.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

PATIENCE_S = 60.0
"""Maximum seconds to wait for events that are quick on an idle machine."""

_PAUSE_FOR_LOOK = 6.0
"""Minimum pause, as a multiple of the computing time of the previous check."""
_LONGEST_PAUSE_S = 0.6


def polls(limit_s: float, *, longest_s: float = 0.05) -> Iterator[bool]:
    """Yield True before each check and pause after the check. Yield False before the last check, after `limit_s`."""
    end, pause_s = time.monotonic() + limit_s, 0.005
    while time.monotonic() < end:
        began_s = _computed_s()
        yield True
        time.sleep(max(pause_s, min(_PAUSE_FOR_LOOK * (_computed_s() - began_s), _LONGEST_PAUSE_S)))
        pause_s = min(longest_s, 1.4 * pause_s)
    yield False


def _computed_s() -> float:
    """Return the processor time of this process and its ended children."""
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
