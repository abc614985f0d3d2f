"""What processes leave in the system's memory when they are killed, and who removes it.

- POSIX segments and semaphores (`/dev/shm`) carry no name of their maker. Python's resource tracker, joblib's, and
  torch's shared memory manager each know those of the processes that started them, and unlink them when these have
  ended. So a killed library's trackers are not killed with it: they end by themselves, and get LIMIT_S for that.
- A System V segment names its maker, so it can be removed here. Semaphores and message queues do not.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Container

LIMIT_S = 5.0
"""torch's manager waits for 2 s before it believes that nobody needs its segments."""

_TRACKS = b"resource_tracker import main"
_TORCH = b"torch_shm_manager"
_SYSTEM_V = "/proc/sysvipc/shm"
_IPC_RMID = 0
_EXITING = 0x4
"""Of the flags in /proc/PID/stat."""
_BEGINS_S = 1.0
"""A process that has just begun its program shows no command line until the kernel has given it a moment."""
_libc = ctypes.CDLL(None, use_errno=True)


def is_tracker(pid: int) -> bool:
    """True for a living process that only cleans up after others."""
    try:
        command = _command_line(pid)
    except OSError:
        return False
    return _TRACKS in command or command.partition(b"\0")[0].endswith(_TORCH)


def _command_line(pid: int) -> bytes:
    """The beginning of a process's command line; of one that has just begun its program, once it is there."""
    until = time.monotonic() + _BEGINS_S
    while True:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read(4096)
        if command or _is_ending(pid) or time.monotonic() > until:
            return command
        time.sleep(0.001)


def _is_ending(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        state, *_, flags = file.read().rpartition(b")")[2].split()[:7]
    return state in (b"Z", b"X") or bool(int(flags) & _EXITING)


def remove_system_v_segments(pids: Container[int], *, since: float) -> int:
    """Remove the segments that these processes of this user, which have ended, have made since a time (of the wall
    clock), and that no process is attached to; how many there were."""
    removed = 0
    try:
        with open(_SYSTEM_V) as file:
            names, *lines = (line.split() for line in file)
    except (OSError, ValueError):  # no System V segments here
        return 0
    for line in lines:
        facts = dict(zip(names, map(int, line), strict=False))
        made_by_one = facts["cpid"] in pids and facts["cuid"] == os.getuid() and facts["ctime"] >= int(since)
        if made_by_one and not facts["nattch"]:
            removed += _libc.shmctl(facts["shmid"], _IPC_RMID, None) == 0
    return removed
