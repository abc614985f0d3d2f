"""How many files and connections a process may have open (RLIMIT_NOFILE).

Many systems start processes with a soft limit of 1,024 and a hard limit far above it: software that still uses
`select` fails with higher descriptors. A process of ours that many others connect to raises its own limit. What it
starts gets the former limit back: a batch system hands the limits of `sbatch` on to jobs, and user code may use
`select`.
"""

from __future__ import annotations

import resource
from contextlib import suppress

_MOST = 1 << 20
"""Some systems allow a thousand millions, and programs that close them all one by one."""
_former: list[tuple[int, int]] = []


def raise_limit() -> int:
    """Raise this process's soft limit to its hard limit, or to a million; returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _former.append((soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def restore_limit(pid: int) -> None:
    """Give a process that this one has just started the limit from before `raise_limit`. No-op without such a call."""
    if _former:
        with suppress(OSError):  # it has ended already
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _former[0])
