"""Run commands of a batch system with a time limit, and read the output of its jobs.

A command that exceeds its limit is killed with all its children. Commands do not get the variables of an enclosing
Slurm job (`SLURM_*`) and the user's defaults (`SBATCH_*`, `SQUEUE_*`, ...). These variables would override a submit
script or change the format of an answer.
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

from stoker.log_files import tail
from stoker.manager.factory.batch import BatchTrouble, Unanswered
from stoker.manager.factory.pacing import Pacer, unlimited

log = logging.getLogger("stoker.factory")

_HIDDEN = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SRUN_")
_SHOWN = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Slurm variables that commands keep: they select an installation."""
_AT_ONCE = 100
_AFTER_KILL_S = 2.0
_MOST_CHARACTERS = 600
_TAIL_BYTES = 4096
_LAST_LINES = 5
_LINE_CHARACTERS = 200

_inherited: list[int] = []
_running: set[int] = set()


def inherit(descriptor: int) -> None:
    """Let every later command inherit a file descriptor, so that the command also holds the lock on the file."""
    _inherited[:] = [descriptor]


def kill_running() -> None:
    for pid in list(_running):
        kill_tree(pid)


class CommandResult(msgspec.Struct, frozen=True):
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The reason of a failure: the last lines of the output, joined."""
        return _one_line(self.err) or _one_line(self.out) or f"exit code {self.code}, no output"


class CommandRunner:
    """Runs commands in one folder, for one thread."""

    def __init__(self, *, limit_s: float, folder: Path, pacer: Pacer | None = None) -> None:
        self.pacer = pacer or unlimited()
        self.limit_s = limit_s
        self.folder = folder
        self._environ = clean_environment(os.environ)

    def run(self, words: Sequence[str], *, name: str = "", more: Mapping[str, str] | None = None) -> CommandResult:
        """Run a command. `name`: its name in errors. `more`: environment variables. Raises Unanswered after the time
        limit, and BatchTrouble if the command cannot start.
        """
        name = name or words[0]
        self.pacer.take()
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)  # a person may have removed the folder
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.folder,
                env={**self._environ, **(more or {})},
                start_new_session=True,
                pass_fds=_inherited,
            )
        except OSError as error:
            raise BatchTrouble(f"{name} cannot be run: {error}") from error
        _running.add(process.pid)
        try:
            out, err = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            try:
                out, err = process.communicate(timeout=_AFTER_KILL_S)
            except subprocess.TimeoutExpired as error:  # the process hangs in a dead file system
                out, err = error.output or b"", error.stderr or b""
            said = _one_line(err.decode(errors="replace")) or _one_line(out.decode(errors="replace"))
            printed = f", after it printed: {said}" if said else ""
            raise Unanswered(f"{name} has not answered for {self.limit_s:g} s{printed}") from None
        finally:
            _running.discard(process.pid)
        log.debug("%s: exit code %d, %d bytes", name, process.returncode, len(out))
        return CommandResult(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    def check(self, words: Sequence[str], *, allow: str = "", more: Mapping[str, str] | None = None) -> CommandResult:
        """Run a command. Raises BatchTrouble also if the command fails, unless its errors contain `allow`."""
        said = self.run(words, more=more)
        if said.code and not (allow and allow in said.err):
            raise BatchTrouble(f"{words[0]}: {said.words}")
        return said

    def shell(self, line: str) -> CommandResult:
        return self.run(["/bin/sh", "-c", line], name=line.split()[0])


def in_chunks(jobs: Sequence[str]) -> list[Sequence[str]]:
    return [jobs[start : start + _AT_ONCE] for start in range(0, len(jobs), _AT_ONCE)]


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if not key.startswith(_HIDDEN) or key in _SHOWN}


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line.partition(": error: ")[2] or line for line in lines]
    return "; ".join(dict.fromkeys(lines[-5:]))[-_MOST_CHARACTERS:]


def kill_tree(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    for member in family:
        with suppress(psutil.Error):
            member.kill()


def last_lines(folder: Path, job: str) -> list[str]:
    """Return the last lines of a job's error output, or of its standard output."""
    for suffix in (".err", ".out"):  # both are missing if the job never ran, or its node cannot write to this folder
        text = tail(folder / f"{job}{suffix}", most_bytes=_TAIL_BYTES)
        if lines := [line.strip() for line in text.splitlines() if line.strip()]:
            return [line[:_LINE_CHARACTERS] for line in lines[-_LAST_LINES:]]
    return []
