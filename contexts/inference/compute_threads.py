"""Helper threads of a thread that computes: given back when another thread computes from now on.

PyTorch's operations share their work among helper threads by OpenMP, and each thread that computes has helpers of its
own, which it keeps. GNU's OpenMP counts them all: as soon as there are more than cores, helpers sleep between
operations instead of waiting awake, and a decode step, which is hundreds of short operations, takes 1.7 times as long
(measured: docs/decisions/058). So a thread that has loaded a model, and leaves the rest to the engine's thread, gives
its helpers back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import Any

_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0 §3.2.43: threads end, settings stay. The next operation makes new ones."""


def release_helper_threads() -> None:
    """End the OpenMP helpers of the calling thread. No-op where OpenMP is not GNU's."""
    library = _openmp()
    if library is not None:
        with contextlib.suppress(AttributeError):  # before OpenMP 5.0
            library.omp_pause_resource_all(_SOFT)


@functools.cache
def _openmp() -> Any:
    """GNU's OpenMP as this process has loaded it; None if it has not. PyTorch was imported before this is asked."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[-1] for line in lines if "libgomp" in line), None)
    return ctypes.CDLL(found) if found is not None else None
