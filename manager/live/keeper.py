"""Keeps a manager running that no program watches: the parent of a detached session's manager.

A manager that dies is started again, and goes on from its journal. One that ends by itself is not: its session is over,
or somebody else runs it. A manager that dies again and again is left alone; `stoker attach` tries once more.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from types import FrameType

log = logging.getLogger("stoker.manager")

FAILED = 4
"""The exit status of a manager that cannot go on, and whose journal is whole: a restart goes on from it."""
RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""More deaths than this within the window, and it is left alone."""


def keep(command: Sequence[str]) -> int:
    """Run a manager until it ends by itself; its exit status. SIGTERM ends the manager, but not the session."""
    deaths: deque[float] = deque(maxlen=RESTARTS)
    stopped = False
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        del number, frame
        stopped = True
        if process is not None:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    while not stopped:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        code = process.wait()
        if code >= 0 and code != FAILED:
            return code
        how = "failed" if code > 0 else f"was killed by signal {-code}"
        log.warning("the manager %s; it is started again with its journal", how)
        deaths.append(time.monotonic())
        if len(deaths) == RESTARTS and deaths[-1] - deaths[0] < RESTART_WINDOW_S:
            log.critical("the manager dies again and again; `stoker attach` starts it once more")
            break
    return 1
