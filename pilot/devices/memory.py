"""GPU memory by library, and host memory after the kernel killed a library.

In a container NVML's process numbers are not ours, so they count only if every process that the driver shows is ours.
Otherwise a library that is alone on a GPU has what was taken since the GPU was empty.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from stoker.pilot.core.events import MemoryShortage
from stoker.pilot.devices.cpu import cgroups, number_in

# ---- memory of GPUs

_FIRST_NAMESPACE = "pid:[4026531836]"
"""The name of the PID namespace that Linux starts with (PROC_PID_INIT_INO), the same on every machine."""


_K = TypeVar("_K")


def sees_all_processes() -> bool:
    """True if process numbers here are the node's, as the driver counts them."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def divide_memory(
    by_process: Mapping[int, int | None] | None,
    processes: Mapping[_K, Collection[int]],
    *,
    taken_bytes: int,
    bare_bytes: int,
    trusted: bool,
) -> dict[_K, int]:
    """Bytes that each library uses of a GPU, without libraries for which it is unknown."""
    ours = {pid for pids in processes.values() for pid in pids}
    if by_process and (trusted or ours >= by_process.keys()):
        return {
            library: sum(by_process[pid] or 0 for pid in pids if pid in by_process)
            for library, pids in processes.items()
            if all(by_process.get(pid, 0) is not None for pid in pids)
        }
    if trusted and by_process is not None:
        return dict.fromkeys(processes, 0)
    if len(processes) == 1 and taken_bytes >= 0 and bare_bytes >= 0:
        return {library: max(0, taken_bytes - bare_bytes) for library in processes}
    return {}


# ---- memory of the host

FRESH_S = 5.0
"""Seconds that a counted kill may be older than the death that it explains: one shortage may end several libraries."""


class OomKills:
    """Detects whether the kernel has just killed for lack of memory. `own_bytes`: this pilot's memory, None =
    unknown."""

    def __init__(
        self,
        own_bytes: Callable[[], int | None],
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own_bytes = own_bytes
        self._root = root
        self._clock = clock
        self._count = self._counted()
        self._noticed_at = -FRESH_S

    def note_kills(self) -> None:
        """Notice kills that were counted since the last look. To be called again and again."""
        count = self._counted()
        if count > self._count:
            self._noticed_at = self._clock()
        self._count = count

    def shortage(self) -> MemoryShortage | None:
        """The limit that leaves the least room; None without a recent kill, or if this pilot's memory is unknown."""
        self.note_kills()
        if self._clock() - self._noticed_at >= FRESH_S:
            return None
        own = self._own_bytes()
        if own is None:
            return None
        levels = [MemoryShortage(limit - used - shared, max(0, used - own)) for limit, used, shared in self._levels()]
        return min(levels, key=lambda level: level.room_bytes, default=None)

    def _counted(self) -> int:
        return _value(self._root / "proc/vmstat", "oom_kill")

    def _levels(self) -> Iterator[tuple[int, int, int]]:
        """Each limit with the memory in use below it and its shared memory, in bytes, without caches."""
        info = self._root / "proc/meminfo"
        total, shared = _value(info, "MemTotal:") * 1024, _value(info, "Shmem:") * 1024
        if total:
            yield total, max(0, total - _value(info, "MemAvailable:") * 1024 - shared), shared
        for folder in cgroups(self._root, "memory"):
            facts = folder / "memory.stat"
            if (limit := number_in(folder / "memory.max")) and (not total or limit < total):
                yield limit, _value(facts, "anon"), _value(facts, "shmem")
            elif (limit := number_in(folder / "memory.limit_in_bytes")) and (not total or limit < total):
                yield limit, _value(facts, "total_rss"), _value(facts, "total_shmem")


def anonymous_bytes(pids: Iterator[int]) -> int | None:
    """Memory that these processes alone, or with others, would have to give up; shared pages are divided."""
    total = 0
    for pid in pids:
        held = _value(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon:", none=-1)
        if held < 0:
            if _lives(pid):
                return None
            continue
        total += held * 1024
    return total


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}") and _value(Path(f"/proc/{pid}/status"), "VmSize:") > 0


def _value(path: Path, name: str, *, none: int = 0) -> int:
    try:
        with path.open() as file:
            for line in file:
                words = line.split()
                if words[:1] == [name] and words[1:2] and words[1].isdecimal():
                    return int(words[1])
    except OSError:
        pass
    return none
