"""Linux process plumbing: dying with a parent, adopting orphans, and finding everything below a process."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator

import psutil

from stoker.pilot.zygote.leftovers import LIMIT_S, is_tracker

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_stuck: set[int] = set()
"""Children that were killed, waited for, and have not ended."""
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")


def die_with_parent(how: int) -> None:
    """Get this signal when the thread that made this process ends."""
    _prctl(_PR_SET_PDEATHSIG, how)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none slips away by forking twice."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int, *, of_main: bool = False) -> list[int]:
    """Direct children of a process; none if it is gone. `of_main`: those that its main thread has made or adopted."""
    found: list[int] = []
    try:
        tasks = [str(pid)] if of_main else os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:  # this thread has ended meanwhile
            if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
                return [child.pid for child in _psutil_children(pid)]  # a kernel without CONFIG_PROC_CHILDREN
        except OSError:
            continue
    return found


def _psutil_children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.Error:
        return []


def tree(pid: int) -> Iterator[int]:
    """A process and all its descendants, parents first."""
    todo = [pid]
    while todo:
        one = todo.pop()
        yield one
        todo += children(one)


def kill_all(pids: Iterable[int], how: int = signal.SIGKILL) -> int:
    """Send a signal to processes; returns how many there still were."""
    sent = 0
    for pid in pids:
        try:
            os.kill(pid, how)
            sent += 1
        except OSError:
            continue
    return sent


def kill_strays(known: Collection[int], *, of_main: bool = False, wait_s: float = 2.0) -> set[int]:
    """Kill every child of this process that is not in `known`, and theirs, until none is left; which children.

    Works because this process adopts orphans: whatever a killed one leaves behind becomes a child of this process, and
    of its main thread. So `of_main` spares what its other threads have made and wait for. Trackers of shared memory are
    spared: they clean up after the others and end by themselves (`end_trackers`). One that the kernel does not let end
    (a driver that hangs) is waited for once.
    """
    killed: set[int] = set()
    until = time.monotonic() + wait_s
    while True:
        here = children(os.getpid(), of_main=of_main)
        strays = [pid for pid in here if pid not in known and not is_tracker(pid)]
        below = (pid for stray in strays for pid in reversed(list(tree(stray))))
        kill_all(pid for pid in below if not is_tracker(pid))
        killed.update(strays)
        for pid in strays:
            reap(pid)
        if _stuck.issuperset(strays):
            return killed
        if time.monotonic() > until:
            _stuck.update(strays)
            return killed
        time.sleep(0.001)


def trackers() -> list[int]:
    """The trackers of shared memory among the children of this process."""
    return [pid for pid in children(os.getpid()) if is_tracker(pid)]


def end_trackers(known: Collection[int] = (), *, wait_s: float = LIMIT_S) -> None:
    """Wait until the trackers among the children of this process have ended; kill those that do not. Those that are
    `known` serve this process itself, and end after it."""
    until = time.monotonic() + wait_s
    while left := [pid for pid in trackers() if pid not in known]:
        for pid in left:
            reap(pid)
        if time.monotonic() > until:
            kill_all(left)
            return
        time.sleep(0.005)


def reap(pid: int) -> tuple[int, int, int] | None:
    """Take a child's end if it has ended: pid, wait status, and its peak memory in bytes. `pid` -1 = any child."""
    try:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return (ended, status, usage.ru_maxrss * 1024) if ended else None
