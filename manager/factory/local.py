"""Run pilots as processes of this machine, so that a session can use it in addition to batch systems.

If the factory restarts, the new factory finds a pilot by the session and block in the pilot's command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from stoker.manager.factory.batch import BatchJobStatus, job_name
from stoker.manager.factory.commands import last_output_lines
from stoker.manager.factory.pilot_command import PILOT, TASKVINE_PILOT
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase
from stoker.protocol.ids import BlockId


def shell_command_for_pilot(worker_init: str, command: str) -> str:
    """Return shell code that runs `worker_init`, and then replaces the shell by the pilot."""
    return f"{worker_init}\nexec {command}" if worker_init else f"exec {command}"


class LocalBatch:
    """Runs pilots as processes of this machine. `folder`: output files of pilots. `worker_init`: shell code that runs
    before a pilot.
    """

    def __init__(self, *, session: str, folder: Path, command: Callable[[BlockId], str], worker_init: str = "") -> None:
        self._session = session
        self._folder = folder
        self._command = command
        self._worker_init = worker_init
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._blocks: dict[str, BlockId] = {}

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:  # noqa: ARG002  # no choice of nodes
        name = job_name(self._session, block)
        # With these arguments, a restarted factory finds the shell before the pilot has replaced it. `set --` hides the
        # arguments from scripts that `worker_init` sources: conda's `activate` would use them as an environment name.
        called = [name, PILOT, "--session", str(self._folder.parent), "--block", block]
        text = f"set --\n{shell_command_for_pilot(self._worker_init, self._command(block))}"
        with (self._folder / f"{name}.out").open("ab") as out, (self._folder / f"{name}.err").open("ab") as err:
            process = subprocess.Popen(
                ["/bin/bash", "-c", text, *called],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        job = str(process.pid)
        self._started[job], self._blocks[job] = process, block
        return job

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        running = self.find()
        return {
            job: BatchJobStatus(BlockPhase.RUNNING) if job in running else self._build_end_status(job) for job in jobs
        }

    def cancel(self, jobs: Sequence[str]) -> None:
        running = self.find()
        for job in jobs:
            if job in running:
                with suppress(ProcessLookupError):
                    os.kill(int(job), signal.SIGTERM)

    def find(self) -> Mapping[str, BlockId]:
        # The command line of a new process may still change, so find the children by their process objects.
        children = [job for job, process in self._started.items() if process.poll() is None]
        return {**self._find_pilot_processes(), **{job: self._blocks[job] for job in children}}

    def _find_pilot_processes(self) -> dict[str, BlockId]:
        session, parents, found = str(self._folder.parent), dict[int, int](), dict[int, BlockId]()
        for process in psutil.process_iter():
            with suppress(psutil.Error, ValueError, IndexError):
                if process.uids().real != os.getuid():
                    continue
                words = process.cmdline()
                if (PILOT in words or TASKVINE_PILOT in words) and words[words.index("--session") + 1] == session:
                    parents[process.pid] = process.ppid()
                    found[process.pid] = BlockId(words[words.index("--block") + 1])
        # A child process of the shell has the shell's command line until it starts its own program, but is not a pilot.
        return {str(pid): block for pid, block in found.items() if parents[pid] not in found}

    def _build_end_status(self, job: str) -> BatchJobStatus:
        process, block = self._started.pop(job, None), self._blocks.pop(job, None)
        code = process.returncode if process is not None else None
        if code == 0:
            return BatchJobStatus(BlockPhase.ENDED, "done")
        if code is None:
            how = "its process is gone"
        else:
            how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        said = last_output_lines(self._folder, job_name(self._session, block)) if block is not None else []
        return BatchJobStatus(BlockPhase.ENDED, f"{how}: {'; '.join(said)}" if said else how)
