"""Restart the manager of a detached session when it dies.

A manager that dies `MOST_DEATHS` times without progress is not restarted. `stoker attach` starts the manager once more.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

log = logging.getLogger("stoker.manager")

MANAGER_FAILED = 4
"""Exit status of a manager that cannot continue."""
NO_PORT = 5
"""Exit status of a restarted manager that finds no free port."""

MOST_DEATHS = 5
WINDOW_S = 60.0
"""After `MOST_DEATHS` deaths without progress within these seconds, the manager is not restarted."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 8.0
_POLL_S = 0.1


class RestartProgress:
    """Shows progress to the keeper: the manager touches a file when its first call ends."""

    def __init__(self, path: Path, *, done: int) -> None:
        self._path = path
        self._done_before = done
        self._is_marked = False

    def mark_first_completed_call(self, done: int) -> None:
        if not self._is_marked and done > self._done_before:
            self._is_marked = True
            with contextlib.suppress(OSError):  # if the disk is full, the keeper sees no progress
                self._path.touch(mode=0o600)


class RestartLimiter:
    def __init__(self, progress: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._before = self._progress_mtime_ns()

    def mark_start(self) -> None:
        self._before = self._progress_mtime_ns()

    def record_death(self) -> float | None:
        """Record a death. Return the seconds until the next start, or None after too many deaths."""
        now = self._clock()
        if self._progress_mtime_ns() != self._before:
            self._deaths.clear()
        self._deaths.append(now)
        recent = sum(now - at < WINDOW_S for at in self._deaths)
        if recent >= MOST_DEATHS:
            return None
        return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (recent - 2)) if recent > 1 else 0.0

    def _progress_mtime_ns(self) -> int:
        try:
            return self._progress.stat().st_mtime_ns
        except OSError:
            return 0


def format_pause(pause_s: float) -> str:
    return f" in {pause_s:g} s" if pause_s else ""


def run_with_restarts(command: Sequence[str], *, progress: Path) -> int:
    """Run a manager, restart it after failures, and return its exit status. SIGTERM ends only the manager."""
    restarts = RestartLimiter(progress)
    stopped, is_first = False, True
    process: subprocess.Popen[bytes] | None = None

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    while not stopped:
        restarts.mark_start()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:  # the host may be out of file descriptors, memory or processes
            how = f"could not be started ({error})"
        else:
            code = process.wait()
            if code >= 0 and code != MANAGER_FAILED and (code != NO_PORT or is_first):
                return code
            is_first = False
            how = "failed" if code > 0 else f"was killed by signal {-code}"
        pause_s = restarts.record_death()
        if pause_s is None:
            log.critical("the manager %s repeatedly; `stoker attach` starts it once more", how)
            break
        log.warning("the manager %s; it is started again with its journal%s", how, format_pause(pause_s))
        until = time.monotonic() + pause_s
        while not stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
    return 1
