"""How tests wait for something to become true. They look often at first, and then less often, so that waiting tests
leave the cores to the programs that they wait for. Some looks are expensive: a search through all processes takes
milliseconds, and a `stoker` command a third of a second. After an expensive look the pause is longer."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

PATIENCE_S = 60.0
"""How long tests wait for events that take a moment on a quiet machine."""

_PAUSE_FOR_LOOK = 6.0
"""A pause is at least this many times as long as the look before it has computed, up to the next."""
_LONGEST_PAUSE_S = 0.6


def polls(limit_s: float, *, longest_s: float = 0.05) -> Iterator[bool]:
    """True for each look that another may follow, with a pause after it; False for the last, after `limit_s`."""
    end, pause_s = time.monotonic() + limit_s, 0.005
    while time.monotonic() < end:
        began_s = _computed_s()
        yield True
        time.sleep(max(pause_s, min(_PAUSE_FOR_LOOK * (_computed_s() - began_s), _LONGEST_PAUSE_S)))
        pause_s = min(longest_s, 1.4 * pause_s)
    yield False


def _computed_s() -> float:
    """The processor time of this process and of its ended children."""
    used = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
