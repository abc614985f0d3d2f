"""Linux processes: adopt orphans, find and measure descendants, and clean up after killed processes.

Resource trackers (Python, joblib) and torch's shared memory manager unlink POSIX segments after their users have ended.
Therefore they may run for LIMIT_S seconds longer than a killed library.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import signal
import time
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import suppress

import psutil

# ---- clean-up after killed processes

TRACKER_LIMIT_S = 5.0  # seconds; PyTorch's shared memory manager waits 2 s after the last user of its segments

_IPC_RMID = 0
_EXITING = 0x4  # flag in /proc/PID/stat of a process that is exiting
_COMMAND_LINE_WAIT_S = 1.0
"""Seconds within which the kernel shows a new process's command line."""
_libc = ctypes.CDLL(None, use_errno=True)


def is_resource_tracker(pid: int) -> bool:
    """True if a process only cleans up resources of other processes."""
    try:
        command = _command_line(pid)
    except OSError:
        return False
    return b"resource_tracker import main" in command or command.partition(b"\0")[0].endswith(b"torch_shm_manager")


def _command_line(pid: int) -> bytes:
    until = time.monotonic() + _COMMAND_LINE_WAIT_S
    while True:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read(4096)
        if command or time.monotonic() > until:
            return command
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *_, flags = file.read().rpartition(b")")[2].split()[:7]
        if state in (b"Z", b"X") or int(flags) & _EXITING:
            return b""
        time.sleep(0.001)


def remove_system_v_segments(pids: Container[int], *, since: float) -> int:
    """Remove the unused shared memory segments that `pids` created after `since` (wall clock)."""
    removed = 0
    try:
        with open("/proc/sysvipc/shm") as file:
            names, *lines = (line.split() for line in file)
    except (OSError, ValueError):  # this kernel has no System V segments
        return 0
    for line in lines:
        facts = dict(zip(names, map(int, line), strict=False))
        is_theirs = facts["cpid"] in pids and facts["cuid"] == os.getuid() and facts["ctime"] >= int(since)
        if is_theirs and not facts["nattch"]:
            removed += _libc.shmctl(facts["shmid"], _IPC_RMID, None) == 0
    return removed


# ---- processes

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 2.0
_stuck: set[int] = set()  # process ids of killed children that did not end in time


def die_with_parent(signal_number: int) -> None:
    """Make the kernel send a signal to this process when the parent thread ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_processes(pid: int, *, of_main_thread: bool = False) -> list[int]:
    found: list[int] = []
    try:
        tasks = [str(pid)] if of_main_thread else os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:  # the thread has ended
            if not _has_children_files():
                with suppress(psutil.Error):
                    return [child.pid for child in psutil.Process(pid).children()]
    return found


@functools.cache
def _has_children_files() -> bool:
    """True if the kernel lists child processes in /proc (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants, parents first."""
    todo = [pid]
    while todo:
        one = todo.pop()
        yield one
        todo += child_processes(one)


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill_stray_children(known: Collection[int], *, of_main_thread: bool = False) -> set[int]:
    """Kill all children that are not `known`, and their descendants, except resource trackers. Return the killed
    children.

    With `of_main_thread`, spare the children of all threads except the main thread, which adopts orphans. The function
    waits only once for a child that the kernel cannot end (a hung driver).
    """
    killed: set[int] = set()
    until = time.monotonic() + _KILL_LIMIT_S
    while True:
        here = child_processes(os.getpid(), of_main_thread=of_main_thread)
        strays = [pid for pid in here if pid not in known and not is_resource_tracker(pid)]
        below = (pid for stray in strays for pid in reversed(list(process_tree(stray))))
        kill_all(pid for pid in below if not is_resource_tracker(pid))
        killed.update(strays)
        for pid in strays:
            reap_child(pid)
        if time.monotonic() > until:
            _stuck.update(strays)
        if _stuck.issuperset(strays):
            return killed
        time.sleep(0.001)


def child_resource_trackers() -> list[int]:
    return [pid for pid in child_processes(os.getpid()) if is_resource_tracker(pid)]


def end_resource_trackers(known: Collection[int] = (), *, wait_s: float = TRACKER_LIMIT_S) -> None:
    """Wait until the child processes that are resource trackers end. Kill them after `wait_s` seconds."""
    until = time.monotonic() + wait_s
    while left := [pid for pid in child_resource_trackers() if pid not in known]:
        for pid in left:
            reap_child(pid)
        if time.monotonic() > until:
            kill_all(left)
            return
        time.sleep(0.005)


def reap_child(pid: int) -> tuple[int, int] | None:
    """Reap the child `pid` if it has ended. Return its pid and status, or None."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return (ended, status) if ended else None


# ---- measurements

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    total = 0
    for one in process_tree(pid):
        with suppress(OSError, IndexError), open(f"/proc/{one}/statm", "rb") as file:
            total += int(file.read().split(None, 2)[1]) * _PAGE
    return total


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size (PSS) of a process tree in bytes. Takes milliseconds."""
    total = 0
    for one in process_tree(pid):
        with suppress(OSError), open(f"/proc/{one}/smaps_rollup", "rb") as file:
            total += next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")), 0)
    return total


class MemoryLimitCheck:
    """Detects whether a library uses more memory than its limit.

    The cheap measurement counts shared pages several times. If the cheap value exceeds the limit, the memory is
    measured exactly after `REMEASURE_S`, or when the cheap value has grown by the remaining memory.
    """

    REMEASURE_S = 2.0

    def __init__(self) -> None:
        self._resident_bytes = self._exact_bytes = 0
        self._measured_at = -math.inf

    def bytes_if_over_limit(self, pid: int, limit_bytes: int, *, now: float) -> int:
        resident = resident_bytes(pid)
        if resident <= limit_bytes:
            return 0
        grown = resident - self._resident_bytes
        if now - self._measured_at >= self.REMEASURE_S or self._exact_bytes + max(0, grown) > limit_bytes:
            self._resident_bytes, self._measured_at = resident, now
            self._exact_bytes = proportional_bytes(pid)
        return self._exact_bytes if self._exact_bytes > limit_bytes else 0


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its ended children."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return sum(map(int, file.read().rpartition(b")")[2].split()[11:15])) / _TICK
    except OSError:
        return 0.0
