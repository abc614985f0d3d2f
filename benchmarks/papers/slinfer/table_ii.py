"""Table II by hand: how many requests of one length an instance with a whole node serves at once.

The largest batch whose decode step is no longer than the time per output token, and whose weights and cache fit into
the 80 GiB of a GPU; a CPU has memory enough. What an engine needs besides is left out, so a GPU holds one or two more
here than in the paper.
"""

from __future__ import annotations

from benchmarks.papers.slinfer.data import OBJECTIVE
from benchmarks.papers.slinfer.worlds import GPU, ROWS, profile_of
from stoker.contexts.step_lines import StepSeconds

_MEMORY_BYTES = 80 * 2**30
_GIB = 2**30 / 1e9
"""The authors' file gives weights in GiB; `data` reads them as GB."""


def concurrency(kind: str, size: str, length: int) -> int:
    """Requests at once."""
    profile = profile_of(size, kind)
    seconds = StepSeconds(profile.times)
    fits = ROWS
    if kind == GPU:
        fits = int((_MEMORY_BYTES - profile.weights_bytes * _GIB) // (profile.token_bytes * length))
    in_time = (rows for rows in range(ROWS, 0, -1) if seconds.decode_s(rows, length)[0] <= OBJECTIVE.tpot_s)
    return min(fits, next(in_time, 0))
