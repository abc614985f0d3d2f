"""One open batch while a gateway follows it: its process, and what is tried again because the system had no room.

A full disk, or too many open files, is over some time. So a step that fails for such a reason is tried again after a
pause, first of a second and then longer; the log says so once, and the batch says it for as long as it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil

log = logging.getLogger("stoker.gateway")

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
_LOOK_S = 0.5

T = TypeVar("T")


class FollowedBatch:
    """What the gateway knows of an open batch beside its file."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.waits = ""
        """Why it is to be tried again; empty while nothing is wrong."""
        self.child: asyncio.subprocess.Process | None = None
        """Its `stoker batch`, if this gateway started it."""
        self.process: psutil.Process | None = None
        """The same, if an earlier gateway started it."""
        self.given: dict[str, str] = {}
        """The files of answers that are stored already: their ids by name."""
        self.pacing: asyncio.Task[None] | None = None
        """Lets its requests begin, where its key has limits."""
        self._hurried = asyncio.Event()

    @property
    def has_process(self) -> bool:
        """True from when its process is started or found until that has ended."""
        return self.child is not None or self.process is not None

    async def process_end(self) -> int | None:
        """Wait until the process ends. Returns its code; None if there was none, or an earlier gateway started it."""
        code = await self.child.wait() if self.child is not None else None
        while _may_run(self.process):
            await asyncio.sleep(_LOOK_S)
        self.child = self.process = None
        return code

    async def until_done(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do a step, again and again after a pause while it raises OSError."""
        pause_s = PAUSE_S
        while True:
            self._hurried.clear()
            try:
                done = await step()
            except OSError as error:
                self._note(error)
            else:
                self.waits = ""
                return done
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def hurry(self) -> None:
        """Try again at once: somebody has cancelled the batch."""
        self._hurried.set()

    def stop(self) -> None:
        """Have its process end, which keeps its answers. No-op if there is none."""
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if self.child is not None:
                self.child.terminate()
            elif self.process is not None:
                self.process.terminate()

    def _note(self, error: OSError) -> None:
        why = error.strerror or str(error)
        if why != self.waits:
            log.warning("batch %s waits and is tried again: %s", self.id, error)
        self.waits = why


def find_process(pid: int, run: Path) -> psutil.Process | None:
    """The `stoker batch` that works in this run folder: the one of this process id, else any of this machine. A gateway
    that was killed, or had no room on its disk, may have started one and not noted which."""
    try:
        named = psutil.Process(pid) if pid else None
        if named is not None and _works_in(named.cmdline(), run):
            return named
    except psutil.Error:
        pass
    for process in psutil.process_iter(["cmdline"]):
        if _works_in(process.info["cmdline"] or [], run):
            return process
    return None


def _may_run(process: psutil.Process | None) -> bool:
    """True unless it has ended for certain: there may be no descriptor to look with."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    except OSError:
        return True


def _works_in(words: list[str], run: Path) -> bool:
    return any(pair == ("--out", str(run)) for pair in itertools.pairwise(words))
