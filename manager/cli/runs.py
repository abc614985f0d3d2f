"""Detached runs (`stoker run --detach`). A folder `runs/NAME` in the state folder contains `run.json`, `log`,
`end.json` and `session` (the session's folder). Until the program ends, a keeper (`run_keeper`) locks the file `lock`.
Other login nodes can see the lock."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click
import msgspec

from stoker.contexts.folders import state_folder
from stoker.decoding import read_json
from stoker.errors import ConfigError, SessionError
from stoker.folders import working_folder
from stoker.locks import is_locked, machine_id, process_start_ticks
from stoker.log_files import read_last_lines
from stoker.manager.cli import console
from stoker.protocol.session import modification_time
from stoker.units import show_seconds

# ---- the folder of a run


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STEM_CHARACTERS = 40
_SIGNAL_STATUS_BASE = 128


class RunFile(msgspec.Struct, frozen=True):
    """The content of `run.json`. Times are in seconds since the epoch."""

    name: str
    command: tuple[str, ...]
    folder: str
    host: str
    machine: str
    pid: int
    pid_started: int
    began_at: float


class RunEnd(msgspec.Struct, frozen=True):
    status: int
    ended_at: float


class DetachedRun:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.log = path / "log"
        self.lock = path / "lock"
        self.file = path / "run.json"
        self.end_file = path / "end.json"

    @property
    def facts(self) -> RunFile | None:
        return read_json(self.file, RunFile)

    @property
    def end(self) -> RunEnd | None:
        return read_json(self.end_file, RunEnd)

    @property
    def session(self) -> str:
        with suppress(OSError):
            return (self.path / "session").read_text()
        return ""

    def is_running(self) -> bool:
        return self.end is None and (is_locked(self.lock) is True or self.is_alive_here())

    def is_alive_here(self) -> bool:
        facts = self.facts
        if facts is None or facts.machine != machine_id():
            return False
        return process_start_ticks(facts.pid) == facts.pid_started != 0

    def describe_state(self) -> str:
        if (end := self.end) is not None:
            return describe_exit_status(end.status)
        return "running" if self.is_running() else "ended without an exit status (process killed or host restarted)"

    def describe(self, *, now: float) -> str:
        facts, end = self.facts, self.end
        if facts is None:
            return f"{self.name}  {self.describe_state()}"
        since = show_seconds(max(0.0, now - facts.began_at))
        if end is not None:
            took = show_seconds(max(0.0, end.ended_at - facts.began_at))
            when = f"ended {show_seconds(max(0.0, now - end.ended_at))} ago, after {took}"
        else:
            when = f"for {since}" if self.is_running() else f"began {since} ago"
        command = " ".join(facts.command)
        return f"{self.name}  {self.describe_state()}  {when}  on {facts.host} (pid {facts.pid})  {command}"


def describe_exit_status(status: int) -> str:
    signal = status - _SIGNAL_STATUS_BASE
    return f"exit status {status}" + (f" (ended by signal {signal})" if 0 < signal < 65 else "")


def runs_folder() -> Path:
    return state_folder() / "runs"


def list_runs() -> list[DetachedRun]:
    with suppress(OSError):
        found = [entry for entry in runs_folder().iterdir() if entry.is_dir()]
        return [DetachedRun(path) for path in sorted(found, key=modification_time, reverse=True)]
    return []


def find_detached_run(name: str) -> DetachedRun | None:
    if not _NAME.fullmatch(name) or not (path := runs_folder() / name).is_dir():
        return None
    return DetachedRun(path)


def suggest_similar_run(name: str) -> str:
    close = difflib.get_close_matches(name, [run.name for run in list_runs()], n=1, cutoff=0.6)
    return f"; did you mean the run {close[0]}?" if close else ""


def create_run(name: str, *, what: str) -> DetachedRun:
    """Create a run's folder. If `name` is empty, use the program's name (`what`) and a number. Raises ConfigError."""
    if name and not _NAME.fullmatch(name):
        why = "is not a valid name; use letters, digits, '-', '_' and '.'"
        raise ConfigError(f"--name: {name!r:.80} {why}", key="name")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(what).stem)[:_STEM_CHARACTERS].strip("-.") or "run"
    folder = runs_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in itertools.count(1):
            run = DetachedRun(folder / (name or f"{stem}-{number}"))
            try:
                run.path.mkdir(mode=0o700)
            except FileExistsError:
                if name:
                    text = f"--name: there is a run {name} ({run.describe_state()}); choose another name"
                    raise ConfigError(text, key="name") from None
            else:
                return run
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be made: {error.strerror}", file=str(error.filename)) from None
    raise AssertionError


# ---- start, follow, stop


_START_LIMIT_S = 30.0
_WATCH_AFTER_START_S = 1.0
_CHECK_EVERY_S = 0.1


def start_run(arguments: Sequence[str], *, name: str, what: str) -> None:
    """Start `stoker run` in a process that outlives the login. Raises ConfigError; SessionError if it fails early."""
    working_folder()
    run = create_run(name, what=what)
    try:
        with open(run.log, "ab") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "stoker.manager.cli.run_keeper", str(run.path), "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise ConfigError(f"{run.log}: cannot be written: {error.strerror}", file=str(run.log)) from None
    until = time.monotonic() + _START_LIMIT_S
    while run.facts is None and keeper.poll() is None and time.monotonic() < until:
        time.sleep(_CHECK_EVERY_S / 5)
    early = time.monotonic() + _WATCH_AFTER_START_S
    while run.facts is not None and run.end is None and keeper.poll() is None and time.monotonic() < early:
        time.sleep(_CHECK_EVERY_S)
    end = run.end
    if run.facts is None or (end is not None and end.status):
        lines = "".join(f"\n  {line}" for line in read_last_lines(run.log).splitlines())
        raise SessionError(f"run {run.name} ended at once: {run.describe_state()}{lines}", log=str(run.log))
    facts = run.facts
    console.lines([
        f"{run.name} runs on {facts.host} (pid {facts.pid}) and continues after you log out; its log is {run.log}",
        f"  follow   stoker logs {run.name} -f",
        f"  attach   stoker attach {run.name}    until it ends, with its exit status; Ctrl-C leaves it running",
        f"  stop     stoker down {run.name}",
    ])  # fmt: skip


def follow_run(run: DetachedRun) -> None:
    """Print a run's log until the run ends, then exit with the run's exit status."""
    try:
        with run.log.open("rb") as file:
            is_running = True
            while is_running:
                is_running = run.is_running()
                while data := file.read(1 << 20):
                    console.write_bytes(data)
                if is_running:
                    time.sleep(_CHECK_EVERY_S)
    except OSError as error:
        raise SessionError(f"{run.log} cannot be read: {error.strerror}", log=str(run.log)) from None
    except KeyboardInterrupt:
        console.note(f"{run.name} keeps running; stoker attach {run.name} shows it, stoker down {run.name} stops it")
        return
    facts, end = run.facts, run.end
    took = f" after {show_seconds(end.ended_at - facts.began_at)}" if facts is not None and end is not None else ""
    console.note(f"{run.name}: {run.describe_state()}{took}")
    raise click.exceptions.Exit(end.status if end is not None else 1)


def stop_run(run: DetachedRun, *, wait_s: float, as_json: bool) -> None:
    facts, done = run.facts, "is over"
    if run.is_running():
        if facts is None or facts.machine != machine_id():
            host = facts.host if facts is not None else "another host"
            raise SessionError(f"{run.name} runs on {host}: log in there and run: stoker down {run.name}")
        if run.is_alive_here():  # otherwise wait: the program is dead, and its keeper writes the exit status
            with suppress(ProcessLookupError):
                os.kill(facts.pid, signal.SIGTERM)
        until = time.monotonic() + wait_s
        while run.is_running():
            if time.monotonic() > until:
                late = f"{run.name} has not ended within {show_seconds(wait_s)}"
                raise SessionError(f"{late}; kill -9 {facts.pid} ends it at once")
            time.sleep(_CHECK_EVERY_S)
        done = "was stopped"
    if as_json:
        console.json(run_to_json(run))
    else:
        console.line(f"{run.name} {done}: {run.describe_state()}")


def run_to_json(run: DetachedRun) -> dict[str, object]:
    end = {"status": run.end.status, "ended_at": run.end.ended_at} if run.end else {"status": None, "ended_at": None}
    facts = {"facts": run.facts, "log": str(run.log), "session": run.session}
    return {"run": run.name, "running": run.is_running(), **end, **facts}
