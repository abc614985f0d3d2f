"""The process of the batch system that started this pilot: when it ends, so does the pilot's right to its node.

HTCondor's starter and Slurm's slurmstepd hold a job's processes together. One that is killed leaves the pilot running
on resources that the batch system gives to somebody else, in a scratch folder that it clears. The kernel then gives
the pilot another parent, which is what is looked at here.

Only for pilots of batch jobs: one that a program started on this machine may outlive it. A pilot whose first parent is
already the init process was started by a wrapper that has left (`setsid`, `nohup`), and is not watched.
"""

from __future__ import annotations

import os
from pathlib import Path

_INIT = 1


class Parent:
    """The parent that this process had first. `watched`: it belongs to a batch system."""

    def __init__(self, *, watched: bool) -> None:
        self.pid = os.getppid()
        self._watched = watched and self.pid > _INIT
        self._name = _name_of(self.pid) if self._watched else ""

    def fault(self) -> str:
        """How it ended, in words; empty while it lives, or is not watched."""
        if not self._watched or os.getppid() == self.pid:
            return ""
        return f"its parent, {self._name} (process {self.pid}), has ended, and with it its batch job"


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "a process"
    except OSError:
        return "a process"
