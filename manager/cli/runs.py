"""Detached runs (`stoker run --detach`): programs that keep running when their terminal is closed.

Each has a folder in the state folder, `runs/NAME`: `run.json` has the command, host and process id, `log` the output,
`end.json` the exit status, and `session` the folder of the session that it has loaded. A keeper (`run_keeper`) starts
the program and writes down its exit status. Until then the keeper holds a lock on `lock`, which other login nodes see.
"""

from __future__ import annotations

import difflib
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError
from stoker.locks import is_locked, machine, started
from stoker.units import show_seconds

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STEM_CHARACTERS = 40
_STATUS_OF_SIGNAL = 128


class RunFile(msgspec.Struct, frozen=True):
    """A program that was started: `command` in `folder`, as process `pid` of a `machine`. Times in seconds since the
    epoch."""

    name: str
    command: tuple[str, ...]
    folder: str
    host: str
    machine: str
    pid: int
    pid_started: int
    began_at: float


class RunEnd(msgspec.Struct, frozen=True):
    """How a program ended: its exit status as a shell tells it (128 + the signal that killed it), and when."""

    status: int
    ended_at: float


class DetachedRun:
    """A detached run, as its folder shows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.log = path / "log"
        self.lock = path / "lock"
        self.file = path / "run.json"
        self.end_file = path / "end.json"

    @property
    def facts(self) -> RunFile | None:
        """The program's command and process; None until the keeper has started it."""
        return _read(self.file, RunFile)

    @property
    def end(self) -> RunEnd | None:
        """How it ended; None if nothing has written that."""
        return _read(self.end_file, RunEnd)

    @property
    def session(self) -> str:
        """The folder of the session that it loaded last; empty if it has loaded none."""
        with suppress(OSError):
            return (self.path / "session").read_text()
        return ""

    def is_running(self) -> bool:
        """True if the program runs, or is being started."""
        return self.end is None and (is_locked(self.lock) is True or self.is_alive_here())

    def is_alive_here(self) -> bool:
        """True if the program is a live process of this machine."""
        facts = self.facts
        return facts is not None and facts.machine == machine() and started(facts.pid) == facts.pid_started != 0

    def state(self) -> str:
        """`running`, `exit status 0`, or the words for an unknown exit status."""
        if (end := self.end) is not None:
            return show_status(end.status)
        return "running" if self.is_running() else "ended without an exit status (killed, or its host was restarted)"

    def title(self, *, now: float) -> str:
        """One line: the state, since when, and where."""
        facts, end = self.facts, self.end
        if facts is None:
            return f"{self.name}  {self.state()}"
        if end is not None:
            when = f"ended {show_seconds(max(0.0, now - end.ended_at))} ago, after {_took(facts, end)}"
        else:
            when = f"{'for' if self.is_running() else 'began'} {show_seconds(max(0.0, now - facts.began_at))}"
            when += "" if self.is_running() else " ago"
        return f"{self.name}  {self.state()}  {when}  on {facts.host} (pid {facts.pid})  {' '.join(facts.command)}"


def show_status(status: int) -> str:
    """`exit status 3`, or `exit status 137 (ended by signal 9)`."""
    signal = status - _STATUS_OF_SIGNAL
    return f"exit status {status}" + (f" (ended by signal {signal})" if 0 < signal < 65 else "")


def runs_folder() -> Path:
    """Where detached runs keep their folders."""
    return state_folder() / "runs"


def known_runs() -> list[DetachedRun]:
    """All runs whose folder is there, the newest first."""
    with suppress(OSError):
        found = [entry for entry in runs_folder().iterdir() if entry.is_dir()]
        return [DetachedRun(path) for path in sorted(found, key=_changed_at, reverse=True)]
    return []


def named_run(name: str) -> DetachedRun | None:
    """The run of this name; None if there is none."""
    if not _NAME.fullmatch(name) or not (path := runs_folder() / name).is_dir():
        return None
    return DetachedRun(path)


def near_runs(name: str) -> str:
    """A hint for the name of a session or a run that is not there: the nearest run; empty if none is near."""
    close = difflib.get_close_matches(name, [run.name for run in known_runs()], n=1, cutoff=0.6)
    return f"; did you mean the run {close[0]}?" if close else ""


def new_run(name: str, *, what: str) -> DetachedRun:
    """A folder for a new run, called `name`, or after `what` it runs. Raises ConfigError."""
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"--name: {name!r:.80} is not a name: write letters, digits, '-', '_' and '.'", key="name")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(what).stem)[:_STEM_CHARACTERS].strip("-.") or "run"
    number, folder = 1, runs_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            path = folder / (name or f"{stem}-{number}")
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                if name:
                    state = DetachedRun(path).state()
                    text = f"--name: there is a run {name} ({state}); choose another name"
                    raise ConfigError(text, key="name") from None
                number += 1
                continue
            return DetachedRun(path)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be made: {error.strerror}", file=str(error.filename)) from None


def remove(run: DetachedRun) -> None:
    """Remove the folder of a run that is over, with its log."""
    shutil.rmtree(run.path, ignore_errors=True)


def over_for_s(run: DetachedRun) -> float:
    """Seconds since anything was written of a run; 0 while it runs."""
    return 0.0 if run.is_running() else max(0.0, time.time() - max(map(_changed_at, (run.path, run.log))))


def render(found: Sequence[DetachedRun], *, now: float) -> list[str]:
    """The lines of `stoker sessions` about runs."""
    return [f"  {run.title(now=now)}" for run in found]


def _took(facts: RunFile, end: RunEnd) -> str:
    return show_seconds(max(0.0, end.ended_at - facts.began_at))


def _changed_at(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _read(path: Path, kind: type[T]) -> T | None:
    with suppress(OSError, *UNREADABLE):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None
