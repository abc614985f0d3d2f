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
from pathlib import Path

_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0 §3.2.43: threads end, settings stay. The next operation makes new ones."""


def release_helper_threads() -> None:
    """End the OpenMP helpers of the calling thread. No-op where OpenMP is not GNU's."""
    for path in _openmp_libraries():
        with contextlib.suppress(AttributeError, OSError):  # before OpenMP 5.0, or removed since
            ctypes.CDLL(path).omp_pause_resource_all(_SOFT)


def _openmp_libraries() -> list[str]:
    """The files of GNU's OpenMP in this process. There may be several: packages bring their own copies."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.split()[-1] for line in lines if "libgomp" in line))
