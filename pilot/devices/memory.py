"""Whose memory on a GPU is whose: processes as the driver numbers them, libraries as this machine does. Pure.

NVML numbers processes as the node does. Inside a container (a PID namespace) the same number is another process, so a
number alone proves nothing there: it counts only when every process that the driver shows is one of ours. Failing that,
a library that is alone on a GPU has what was taken since nothing was loaded there; of several nothing can be told, and
what their frameworks say stands.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TypeVar

_FIRST_NAMESPACE = "pid:[4026531836]"
"""The name of the PID namespace that Linux starts with (PROC_PID_INIT_INO), the same on every machine."""


_K = TypeVar("_K")


def sees_all_processes() -> bool:
    """True if process numbers here are those of the node, as the driver has them."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def divide(
    by_process: Mapping[int, int | None] | None,
    processes: Mapping[_K, Collection[int]],
    *,
    taken_bytes: int,
    bare_bytes: int,
    trusted: bool,
) -> dict[_K, int]:
    """Bytes that each library uses of a GPU; a library of which nothing can be told is left out.

    `processes`: of each library that is on the GPU. `taken_bytes`, `bare_bytes`: what is taken of the GPU now, and what
    was while no library was there (-1 = not known). `trusted`: process numbers are the driver's.
    """
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
