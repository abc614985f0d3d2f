"""Keeps a manager running that no program watches: the parent of a detached session's manager.

A manager that dies is started again, and goes on from its journal. One that ends by itself is not: its session is over,
or somebody else runs it. A manager that dies again and again, and does nothing meanwhile, is left alone (`restarts`);
`stoker attach` tries once more. A start that fails counts as a death.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from stoker.manager.live.ports_taken import NO_PORT
from stoker.manager.live.restarts import Restarts, after

log = logging.getLogger("stoker.manager")

FAILED = 4
"""The exit status of a manager that cannot go on, and whose journal is whole: a restart goes on from it."""
_POLL_S = 0.1


def keep(command: Sequence[str], *, progress: Path) -> int:
    """Run a manager until it ends by itself; its exit status. SIGTERM ends the manager, but not the session.
    `progress`: the file that a manager touches when it has done something. If the very first manager finds no free port
    it is not started again: the command that waits for it tells a person, who can free one."""
    restarts = Restarts(progress)
    stopped, is_first = False, True
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        del number, frame
        stopped = True
        if process is not None:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    while not stopped:
        restarts.started()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:  # out of descriptors, memory or processes, for a while
            how = f"could not be started ({error})"
        else:
            code = process.wait()
            if code >= 0 and code != FAILED and (code != NO_PORT or is_first):
                return code
            is_first = False
            how = "failed" if code > 0 else f"was killed by signal {-code}"
        pause_s = restarts.died()
        if pause_s is None:
            log.critical("the manager %s, again and again; `stoker attach` starts it once more", how)
            break
        log.warning("the manager %s; it is started again with its journal%s", how, after(pause_s))
        until = time.monotonic() + pause_s
        while not stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
    return 1
