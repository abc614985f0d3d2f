"""How often a manager that dies is started again, and after which pause.

A manager that does something between its deaths is worth its restarts, however many: it says so once in its life, when
the first call has ended (`RestartProgress`). Deaths without that are counted. The first one costs no pause, since most
are single kills; then the pause grows, because what is wrong (a full disk, a file system that is away) may pass.

Keeps a manager running that no program watches: the parent of a detached session's manager.

A manager that dies is started again, and goes on from its journal. One that ends by itself is not: its session is over,
or somebody else runs it. A manager that dies again and again, and does nothing meanwhile, is left alone (`restarts`);
`stoker attach` tries once more. A start that fails counts as a death.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from stoker.manager.live.doors import NO_PORT

# ---- restarts


MOST_DEATHS = 5
WINDOW_S = 60.0
"""So many deaths without progress within the window, and the manager is left alone."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 8.0
"""The pause before the second restart in a row; it doubles up to the longest."""


class RestartProgress:
    """The manager's side: a file that is touched once in a manager's life."""

    def __init__(self, path: Path, *, done: int) -> None:
        self._path = path
        self._done_before = done
        self._is_said = False

    def report_first_end(self, done: int) -> None:
        """Note that a call has ended under this manager, once. `done`: how many have ended in all."""
        if self._is_said or done <= self._done_before:
            return
        self._is_said = True
        try:
            self._path.touch(mode=0o600)
        except OSError:  # no room, or no file system: the keeper believes that nothing was done
            pass


class Restarts:
    """The keeper's side: what to do about each death. `clock` is in seconds and does not jump."""

    def __init__(self, progress: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._before = self._seen()

    def started(self) -> None:
        """A manager is about to start."""
        self._before = self._seen()

    def died(self) -> float | None:
        """It has died. Seconds until the next start; None if it is to be left alone."""
        now = self._clock()
        if self._seen() != self._before:
            self._deaths.clear()
        self._deaths.append(now)
        recent = sum(now - at < WINDOW_S for at in self._deaths)
        if recent >= MOST_DEATHS:
            return None
        return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (recent - 2)) if recent > 1 else 0.0

    def _seen(self) -> int:
        try:
            return self._progress.stat().st_mtime_ns
        except OSError:
            return 0


def after_pause(pause_s: float) -> str:
    """` in 2 s`, for people; nothing for a restart at once."""
    return f" in {pause_s:g} s" if pause_s else ""


# ---- keeper


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
        log.warning("the manager %s; it is started again with its journal%s", how, after_pause(pause_s))
        until = time.monotonic() + pause_s
        while not stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
    return 1
