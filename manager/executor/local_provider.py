"""Parsl's provider for processes of this machine, in a run folder of any name.

Parsl's own writes the path of the submit script into a shell command as it is: in a folder whose name has a space no
pilot starts, and its status cannot be read. Nor can it when the folder is removed while its blocks run.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from parsl.jobs.states import JobState, JobStatus
from parsl.providers import LocalProvider
from parsl.providers.errors import SubmitException
from parsl.utils import execute_wait

_PID = "PID:"


class QuotedLocalProvider(LocalProvider):  # type: ignore[misc]  # Parsl has no types
    """As Parsl's, with every path quoted, and for a folder that may vanish."""

    def submit(self, command: str, tasks_per_node: int, job_name: str = "parsl.localprovider") -> str:
        """Start a block; its id. Raises SubmitException."""
        name = f"{job_name}.{time.time()}"
        script = str(Path(self.script_dir, f"{name}.sh").absolute())
        launched = self.launcher(command, tasks_per_node, self.nodes_per_block, self.script_dir)
        self._write_submit_script(f"{self.worker_init}\nexport JOBNAME={shlex.quote(name)}\n{launched}", script)
        run = "bash {0} 1>{0}.out 2>{0}.err; echo $? >{0}.ec".format(shlex.quote(script))
        start = f'echo - >{shlex.quote(script)}.ec && {{ {{ {run}; }} >/dev/null 2>&1 & echo "{_PID}$!"; }}'
        code, out, err = execute_wait(f"/bin/bash -c {shlex.quote(start)}", self.cmd_timeout)
        pids: list[str] = [line.removeprefix(_PID).strip() for line in out.splitlines() if line.startswith(_PID)]
        if code or not pids:
            raise SubmitException(name, f"the block's shell ended with exit code {code}", out, err)
        facts: dict[str, Any] = {"job_id": pids[0], "status": JobStatus(JobState.RUNNING)}
        self.resources[pids[0]] = {**facts, "remote_pid": int(pids[0]), "script_path": script}
        return pids[0]

    def cancel(self, job_ids: list[str]) -> list[bool]:
        """End blocks. What was stopped in them (SIGSTOP) goes on, and ends."""
        groups = {pid: _group(pid) for pid in (self.resources[job]["remote_pid"] for job in job_ids)}
        done: list[bool] = super().cancel(job_ids)
        for group in filter(None, groups.values()):
            with suppress(OSError):  # it has ended
                os.killpg(group, signal.SIGCONT)
        return done

    def _read_job_file(self, script_path: str, suffix: str) -> str:
        """The content of a job's file. Without the file of its exit code the job's process alone tells how it is."""
        try:
            return str(super()._read_job_file(script_path, suffix))
        except OSError:
            if suffix != ".ec":
                raise
            return "-"


def _group(pid: int) -> int:
    """The process group of a block's shell; 0 if it has ended."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0
