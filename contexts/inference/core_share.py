"""Choose the number of compute threads of a library that shares its cores.

PyTorch's threads spin between two operations and slow down other libraries on the same cores (docs/decisions/066). If
`n` threads got clearly less than `n` cores while no core was idle, the library uses as many threads as it got cores. If
cores become idle, the library tries more threads. The pause between tries doubles after each failure.

Too many OpenMP helper threads slow down decode steps (docs/decisions/058), so a thread that has loaded a model releases
its helpers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from math import floor
from pathlib import Path

import psutil
import torch

log = logging.getLogger(__name__)

_WINDOW_S = 0.5  # seconds of computation between two checks of the processor time
_CROWDED_SHARE = 0.75  # if each thread gets less than this share of a core and few cores are idle, use fewer threads
_MIN_IDLE_CORES = 0.8  # add threads if at least this many cores are idle on average
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 300.0


class CoreShare:
    """Adapts the number of PyTorch threads within `computing()`. `idle_cores`: returns the mean number of idle cores
    since its last call.
    """

    def __init__(
        self,
        *,
        idle_cores: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        cpu_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._idle_cores, self._clock, self._cpu_time = idle_cores, clock, cpu_time
        self._most: int | None = None  # maximum number of threads; None: no limit
        self._wall_s = self._cpu_s = self._thread_s = 0.0
        self._try_at, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._is_trying_more_threads = False
        self._local = threading.local()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        wanted, threads = self._set_thread_count()
        began_s, began_cpu_s = self._clock(), self._cpu_time()
        try:
            yield
        finally:
            now = self._clock()
            self._wall_s += now - began_s
            self._thread_s += threads * (now - began_s)
            self._cpu_s += self._cpu_time() - began_cpu_s
            if self._wall_s >= _WINDOW_S:
                self._adapt_thread_count(now, wanted)

    def _set_thread_count(self) -> tuple[int, int]:
        """Limit PyTorch's threads. Return the number that the program chose, and the limited number."""
        has = torch.get_num_threads()
        wanted, was_set = getattr(self._local, "set", (has, has))
        if has != was_set:
            wanted = has
        fits = wanted if self._most is None else min(wanted, self._most)
        if fits != has:
            torch.set_num_threads(fits)
        self._local.set = wanted, fits
        return wanted, fits

    def _adapt_thread_count(self, now: float, wanted: int) -> None:
        threads, share, idle = self._thread_s / self._wall_s, self._cpu_s / self._wall_s, self._idle_cores()
        self._wall_s = self._cpu_s = self._thread_s = 0.0
        if threads > 1 and share < _CROWDED_SHARE * threads and idle < (threads - share) / 2:
            if self._is_trying_more_threads:
                self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s)
            else:
                log.info("other processes use the same cores: %.0f threads got the time of %.1f cores", threads, share)
            self._most, self._try_at, self._is_trying_more_threads = (
                max(1, floor(share + 0.2)),
                now + self._pause_s,
                False,
            )
        elif self._is_trying_more_threads:
            self._is_trying_more_threads, self._pause_s = False, _FIRST_PAUSE_S
        elif self._most is not None and now >= self._try_at and idle >= _MIN_IDLE_CORES:
            more = self._most + floor(idle + 1 - _MIN_IDLE_CORES)
            self._most, self._is_trying_more_threads = more if more < wanted else None, True


class _IdleCoreMeter:
    """Measures how many of this process's cores were idle on average since the last call."""

    def __init__(self) -> None:
        self._at, self._idle_s = time.perf_counter(), _total_idle_seconds()

    def __call__(self) -> float:
        began, before = self._at, self._idle_s
        self._at, self._idle_s = time.perf_counter(), _total_idle_seconds()
        return max(0.0, self._idle_s - before) / (self._at - began)


def _total_idle_seconds() -> float:
    mine, all_times = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
    return float(sum(times.idle + times.iowait for core, times in enumerate(all_times) if core in mine))


@functools.cache
def get_core_share() -> CoreShare:
    return CoreShare(idle_cores=_IdleCoreMeter())


def compute_context_for_device(device: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager for computing on a device. On a CPU, it adapts the number of threads."""
    return get_core_share().computing if device.startswith("cpu") else contextlib.nullcontext


_OMP_PAUSE_SOFT = 1
"""`omp_pause_soft` (OpenMP 5.0 §3.2.43): the threads end, and the next operation starts new threads."""


def release_helper_threads() -> None:
    """Stop the OpenMP helper threads of the calling thread, if PyTorch uses GNU OpenMP."""
    for path in _openmp_libraries():
        with contextlib.suppress(AttributeError, OSError):  # OpenMP before 5.0 has no such function
            ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_SOFT)


def _openmp_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.split()[-1] for line in lines if "libgomp" in line))
