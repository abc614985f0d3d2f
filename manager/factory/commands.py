"""Commands of a batch system, each bounded in time.

A command that hangs (a scheduler under load, a file system that is away) must not hang the one who asked. When its time
is up it is killed with everything that it has started, and its name is told with how long it has taken and what it had
printed by then: `sbatch` says of a full queue that it is "sleeping and retrying", for minutes. Parsl's own
`execute_wait` leaves such a command running, and raises TimeoutExpired through whatever it was doing.

Commands do not see what Slurm put into the environment when this program runs in a job of its own (`SLURM_*`), nor the
user's defaults (`SBATCH_*`, `SQUEUE_*`, ...): both override what a submit script says, or the form of an answer.

What a job printed: the evidence of one that ended before its pilot could say anything.
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

from stoker.manager.factory.batch import BatchTrouble, Unanswered
from stoker.manager.factory.pacing import Pacer

# ---- commands


log = logging.getLogger("stoker.factory")

_HIDDEN = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SRUN_")
_SHOWN = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Which Slurm is meant; everything else that begins so says how."""
_AFTER_KILL_S = 2.0
_MOST_CHARACTERS = 600


_inherited: list[int] = []


def inherit(descriptor: int) -> None:
    """Every command of this process has this descriptor open from now on, and with it the lock on its file: while one
    runs, also when this process is long dead, the lock is held."""
    _inherited[:] = [descriptor]


_running: set[int] = set()


def kill_running() -> None:
    """Kill the commands that this process has under way: it is about to exit, and nobody would read what they say."""
    for pid in list(_running):
        kill_tree(pid)


class CommandResult(msgspec.Struct, frozen=True):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Why it failed, in its own words: the last lines of what it printed, on one line."""
        return _one_line(self.err) or _one_line(self.out) or f"exit code {self.code}, and not a word"


class CommandRunner:
    """Runs the commands of one batch system in one folder. Not for several threads."""

    def __init__(
        self, *, limit_s: float, folder: Path, environ: Mapping[str, str] = os.environ, pacer: Pacer | None = None
    ) -> None:
        self._pacer = pacer
        self.limit_s = limit_s
        self.folder = folder
        self._environ = clean_environment(environ)

    def run(self, words: Sequence[str], *, name: str = "", more: Mapping[str, str] | None = None) -> CommandResult:
        """Run a command; `name` is what errors call it, `more` variables for this command alone.

        Raises Unanswered if it does not end in time, BatchTrouble if it cannot start.
        """
        name = name or words[0]
        if self._pacer is not None:
            self._pacer.take()
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
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
            out, err = _killed(process)
            words = _one_line(err.decode(errors="replace")) or _one_line(out.decode(errors="replace"))
            said_so_far = f", after it had said: {words}" if words else ""
            raise Unanswered(f"{name} has not answered for {self.limit_s:g} s{said_so_far}") from None
        finally:
            _running.discard(process.pid)
        said = CommandResult(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
        log.debug("%s: exit code %d, %d bytes", name, said.code, len(out))
        return said

    def shell(self, line: str, *, name: str = "") -> CommandResult:
        """Run a line of shell. Raises BatchTrouble as `run` does."""
        return self.run(["/bin/sh", "-c", line], name=name or line.split()[0])


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What commands of a batch system see of this environment."""
    return {key: value for key, value in environ.items() if not key.startswith(_HIDDEN) or key in _SHOWN}


def _killed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill a command whose time is up; what it had printed by then."""
    kill_tree(process.pid)
    try:
        return process.communicate(timeout=_AFTER_KILL_S)
    except subprocess.TimeoutExpired as error:  # what a kill cannot end (a dead file system) is left behind
        return error.output or b"", error.stderr or b""


def _one_line(text: str) -> str:
    """The last lines of what a command printed, without its own name, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line.partition(": error: ")[2] or line for line in lines]
    return "; ".join(dict.fromkeys(lines[-5:]))[-_MOST_CHARACTERS:]


def kill_tree(pid: int) -> None:
    """Kill a process that we have started, and everything that it has."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return
    for member in family:
        with suppress(psutil.Error):
            member.kill()


# ---- output


_TAIL_BYTES = 4096
_LAST_LINES = 5
_LINE_CHARACTERS = 200


def last_lines(folder: Path, job: str) -> list[str]:
    """The last lines that the job of this name printed: its errors, or if there are none its output."""
    for suffix in (".err", ".out"):
        lines = [line.strip() for line in _tail(folder / f"{job}{suffix}").splitlines() if line.strip()]
        if lines:
            return [line[:_LINE_CHARACTERS] for line in lines[-_LAST_LINES:]]
    return []


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as data:
            data.seek(0, 2)
            data.seek(max(0, data.tell() - _TAIL_BYTES))
            return data.read().decode(errors="replace")
    except OSError:  # it never ran, or its node cannot write here
        return ""
