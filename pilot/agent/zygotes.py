"""One zygote for each set of modules that recipes want preloaded.

A zygote that imports for one recipe never burdens another's libraries, and one that dies (a module that crashes when
it is imported) takes only its own libraries along. Zygotes that nobody has used for a while end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from stoker.pilot.zygote import processes
from stoker.pilot.zygote.client import Zygote
from stoker.pilot.zygote.leftovers import LIMIT_S

_IDLE_S = 600.0
_CLEAN_S = 3.0 + LIMIT_S
"""How long a zygote may take to end its libraries and what they leave."""


class Zygotes:
    """The zygotes of one agent."""

    def __init__(self, *, logs: Path, scratch: Path, umask: int = -1) -> None:
        self._umask = umask
        self._logs = logs
        self._scratch = scratch
        self._by_preload: dict[tuple[str, ...], Zygote] = {}
        self._used_at: dict[tuple[str, ...], float] = {}
        self._made = 0

    def get(self, preload: tuple[str, ...]) -> tuple[Zygote, bool]:
        """The zygote for these modules, and whether it was started just now. Raises OSError."""
        key = tuple(dict.fromkeys(preload))
        self._used_at[key] = time.monotonic()
        found = self._by_preload.get(key)
        if found is not None:
            return found, False
        log = self._logs / f"zygote-{self._made}.log"
        self._made += 1
        found = Zygote(key, log=log, scratch=self._scratch, environ=os.environ, umask=self._umask)
        self._by_preload[key] = found
        return found, True

    def __iter__(self) -> Iterator[Zygote]:
        return iter(list(self._by_preload.values()))

    def forget(self, zygote: Zygote) -> None:
        """The zygote has ended: kill it for good, and what its libraries left behind. Probes of devices go on."""
        self._by_preload.pop(zygote.preload, None)
        zygote.destroy()
        processes.kill_strays({other.pid for other in self}, of_main=True)

    def idle(self) -> list[Zygote]:
        """Zygotes without libraries that nobody has asked for in a long time."""
        now = time.monotonic()
        return [z for z in self if not z.libraries and z.preload and now - self._used_at[z.preload] > _IDLE_S]

    def close(self) -> None:
        """End them all, and everything below them."""
        here = list(self)
        for zygote in here:
            zygote.close()
        for zygote in here:
            if zygote.ready:  # one that still imports would not look up for seconds, and has no library yet
                zygote.wait(_CLEAN_S)
            zygote.destroy()
        self._by_preload.clear()
        processes.kill_strays(())
        processes.end_trackers()
