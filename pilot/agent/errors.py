"""Whose fault an error of the system is."""

from __future__ import annotations

import errno

from stoker.pilot.cache import DiskError
from stoker.pilot.core.infrastructure import takes_no_writes


def is_pilots_fault(error: BaseException) -> bool:
    """Whether this pilot's disk is to blame for an error: another pilot may do better."""
    return isinstance(error, DiskError) or takes_no_writes(error)


def lacks_processes(error: BaseException) -> bool:
    """True if the node has no room for another process: its user's limit is reached, or there is no memory."""
    return isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM)


def no_process(reason: object) -> str:
    """What to say of a library whose process could not be made."""
    return (
        f"no process could be made for it: {reason}; end other processes there, or raise the limit of processes"
        " (ulimit -u) or of memory"
    )
