"""Measured memory and processor time of a library: its process and everything below it."""

from __future__ import annotations

import math
import os

from stoker.pilot.zygote.processes import tree

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants. Pages that they share count once for each."""
    total = 0
    for one in tree(pid):
        try:
            with open(f"/proc/{one}/statm", "rb") as file:
                total += int(file.read().split(None, 2)[1]) * _PAGE
        except (OSError, IndexError):
            continue
    return total


def proportional_bytes(pid: int) -> int:
    """The same with shared pages divided among those that share them: exact, and dear to ask (milliseconds)."""
    total = 0
    for one in tree(pid):
        try:
            with open(f"/proc/{one}/smaps_rollup", "rb") as file:
                total += next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")), 0)
        except OSError:
            continue
    return total


class MemoryLimit:
    """Finds out whether a library takes more memory than its limit.

    The cheap measure comes first. It counts shared pages several times (a child that is just being started shares all
    of them), so it only raises a suspicion. The exact one is taken again when the cheap one has grown by as much as
    was left, or after `AGAIN_S`: when a process ends, those that shared its pages are charged more for them.
    """

    AGAIN_S = 2.0

    def __init__(self) -> None:
        self._resident_bytes = self._exact_bytes = 0
        self._measured_at = -math.inf

    def excess(self, pid: int, limit_bytes: int, *, now: float) -> int:
        """Bytes that a library really takes, if that is more than its limit; else 0. `now`: a clock in seconds."""
        resident = resident_bytes(pid)
        if resident <= limit_bytes:
            return 0
        grown = resident - self._resident_bytes
        if now - self._measured_at >= self.AGAIN_S or self._exact_bytes + max(0, grown) > limit_bytes:
            self._resident_bytes, self._measured_at = resident, now
            self._exact_bytes = proportional_bytes(pid)
        return self._exact_bytes if self._exact_bytes > limit_bytes else 0


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, its threads and its ended children."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) / _TICK
    except (OSError, IndexError, ValueError):
        return 0.0


def tail(path: str, *, start: int = 0, lines: int = 20, most_bytes: int = 16_384) -> str:
    """The last lines of a log file from the byte `start` on, as text that fits a message."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return ""
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:])
