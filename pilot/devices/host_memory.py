"""Who holds the host's memory after the kernel has killed a library for want of it.

The kernel counts such kills of the whole node (`oom_kill` of /proc/vmstat, since Linux 4.13). Each limit that holds
this pilot is looked at: those of its cgroups and the node's memory. What is in use there and is not this pilot's own
belongs to others: another job's processes, a daemon, whatever was started beside the pilot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.pilot.core.events import MemoryShortage
from stoker.pilot.devices.cpu import cgroups


class OomKills:
    """Tells whether the kernel has killed for want of memory since it was asked last. `own_bytes`: what this pilot's
    processes hold, exactly."""

    def __init__(self, own_bytes: Callable[[], int], *, root: Path = Path("/")) -> None:
        self._own_bytes = own_bytes
        self._root = root
        self._count = self._counted()

    def shortage(self) -> MemoryShortage | None:
        """The limit that leaves the least room; None if the kernel has killed nothing since."""
        count = self._counted()
        has_killed, self._count = count > self._count, count
        if not has_killed:
            return None
        own = self._own_bytes()
        levels = [MemoryShortage(limit - used, max(0, used - own)) for limit, used in self._levels()]
        return min(levels, key=lambda level: level.room_bytes, default=None)

    def _counted(self) -> int:
        return _value(self._root / "proc/vmstat", "oom_kill")

    def _levels(self) -> Iterator[tuple[int, int]]:
        """Each limit with what is in use below it, in bytes; the kernel gives up caches before it kills."""
        info = self._root / "proc/meminfo"
        total = _value(info, "MemTotal:") * 1024
        if total:
            yield total, total - _value(info, "MemAvailable:") * 1024
        for folder in cgroups(self._root, "memory"):
            facts = folder / "memory.stat"
            if (limit := _number(folder / "memory.max")) and (not total or limit < total):
                yield limit, _value(facts, "anon") + _value(facts, "shmem")
            elif (limit := _number(folder / "memory.limit_in_bytes")) and (not total or limit < total):
                yield limit, _value(facts, "total_rss") + _value(facts, "total_shmem")


def anonymous_bytes(pids: Iterator[int]) -> int:
    """Memory that these processes alone, or with others, would have to give up; shared pages are divided."""
    total = 0
    for pid in pids:
        total += _value(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon:") * 1024
    return total


def _number(path: Path) -> int:
    """The number in a file; 0 where there is none (`max`, or no such file)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def _value(path: Path, name: str) -> int:
    """The number behind a name in a file of lines; 0 where there is none."""
    try:
        with path.open() as file:
            for line in file:
                words = line.split()
                if words[:1] == [name] and words[1:2] and words[1].isdecimal():
                    return int(words[1])
    except OSError:
        pass
    return 0
