"""Run commands of a batch system with a time limit, and read the output of its jobs.

A command that exceeds its limit is killed with all its children. Commands do not inherit variables of a surrounding
Slurm job (`SLURM_*`) or the user's defaults (`SBATCH_*`, `SQUEUE_*`, ...), because these would override a submit script
or change the format of an answer.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from stoker.log_files import read_last_lines
from stoker.manager.factory.batch import BatchSystemError, CommandUnanswered
from stoker.manager.factory.pacing import RequestPacer, unlimited_pacer

log = logging.getLogger("stoker.factory")

_REMOVED_VARIABLE_PREFIXES = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SRUN_")
_KEPT_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Slurm variables that commands inherit, because they select the Slurm installation."""
_MAX_JOBS_PER_COMMAND = 100
_OUTPUT_WAIT_AFTER_KILL_S = 2.0
_MAX_CHARACTERS = 600
_MAX_TAIL_BYTES = 4096
_MAX_LAST_LINES = 5
_MAX_LINE_CHARACTERS = 200

_inherited_descriptors: list[int] = []
_running_pids: set[int] = set()


def inherit_descriptor(descriptor: int) -> None:
    """Let every later command inherit the file descriptor of a lock, so that the command also holds the lock."""
    _inherited_descriptors[:] = [descriptor]


def kill_running_commands() -> None:
    for pid in list(_running_pids):
        kill_process_tree(pid)


class CommandResult(msgspec.Struct, frozen=True):
    code: int
    out: str
    err: str

    @property
    def failure_reason(self) -> str:
        """Why the command failed: the last lines of its output, in one line."""
        return _join_last_lines(self.err) or _join_last_lines(self.out) or f"exit code {self.code}, no output"


class CommandRunner:
    """Runs commands of a batch system in a folder. Only one thread may use it."""

    def __init__(self, *, limit_s: float, folder: Path, pacer: RequestPacer | None = None) -> None:
        self.pacer = pacer or unlimited_pacer()
        self.limit_s = limit_s
        self.folder = folder
        self._environ = remove_batch_variables(os.environ)

    def run(
        self, words: Sequence[str], *, name: str = "", environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command. `name`: its name in error messages. `environment`: additional environment variables.

        Raises CommandUnanswered after the time limit, and BatchSystemError if the command cannot start.
        """
        name = name or words[0]
        self.pacer.take_token()
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)  # a person may have removed the folder
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.folder,
                env={**self._environ, **(environment or {})},
                start_new_session=True,
                pass_fds=_inherited_descriptors,
            )
        except OSError as error:
            raise BatchSystemError(f"{name} cannot be run: {error}") from error
        _running_pids.add(process.pid)
        try:
            out, err = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            kill_process_tree(process.pid)
            try:
                out, err = process.communicate(timeout=_OUTPUT_WAIT_AFTER_KILL_S)
            except subprocess.TimeoutExpired as error:  # the process hangs in a dead file system
                out, err = error.output or b"", error.stderr or b""
            said = _join_last_lines(err.decode(errors="replace")) or _join_last_lines(out.decode(errors="replace"))
            printed = f", after it printed: {said}" if said else ""
            raise CommandUnanswered(f"{name} has not answered for {self.limit_s:g} s{printed}") from None
        finally:
            _running_pids.discard(process.pid)
        log.debug("%s: exit code %d, %d bytes", name, process.returncode, len(out))
        return CommandResult(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    def run_or_raise(
        self, words: Sequence[str], *, allowed_error: str = "", environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command. Raises BatchSystemError if it fails, unless its errors contain `allowed_error`."""
        said = self.run(words, environment=environment)
        if said.code and not (allowed_error and allowed_error in said.err):
            raise BatchSystemError(f"{words[0]}: {said.failure_reason}")
        return said

    def run_shell_line(self, line: str) -> CommandResult:
        return self.run(["/bin/sh", "-c", line], name=line.split()[0])


def split_into_chunks(jobs: Sequence[str]) -> list[Sequence[str]]:
    return [jobs[start : start + _MAX_JOBS_PER_COMMAND] for start in range(0, len(jobs), _MAX_JOBS_PER_COMMAND)]


def remove_batch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in environ.items()
        if not key.startswith(_REMOVED_VARIABLE_PREFIXES) or key in _KEPT_VARIABLES
    }


def _join_last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line.partition(": error: ")[2] or line for line in lines]
    return "; ".join(dict.fromkeys(lines[-5:]))[-_MAX_CHARACTERS:]


def kill_process_tree(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    for member in family:
        with suppress(psutil.Error):
            member.kill()


def last_output_lines(folder: Path, job: str) -> list[str]:
    """Return the last lines of a job's error output, or of its standard output."""
    # both files are missing if the job never ran, or its node cannot write to this folder
    for suffix in (".err", ".out"):
        text = read_last_lines(folder / f"{job}{suffix}", most_bytes=_MAX_TAIL_BYTES)
        if lines := [line.strip() for line in text.splitlines() if line.strip()]:
            return [line[:_MAX_LINE_CHARACTERS] for line in lines[-_MAX_LAST_LINES:]]
    return []
