"""Starting a detached run, following it, and stopping it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import click

from stoker.errors import ConfigError, SessionError
from stoker.locks import machine
from stoker.manager.cli import console, runs
from stoker.manager.cli.runs import DetachedRun
from stoker.units import show_seconds
from stoker.working_folder import working_folder

_START_S = 30.0
"""A keeper has started its program within this."""
_EARLY_S = 1.0
"""A program that ends within this is shown with its error."""
_LOOK_EVERY_S = 0.1
_TAIL_BYTES = 4096


def start(arguments: Sequence[str], *, name: str, what: str) -> DetachedRun:
    """Start `stoker run` with these arguments as a detached run, and say how to reach it. Raises ConfigError, and
    SessionError, with the program's output, if it ends at once."""
    working_folder()
    run = runs.new_run(name, what=what)
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
        runs.remove(run)
        raise ConfigError(f"{run.log}: cannot be written: {error.strerror}", file=str(run.log)) from None
    until = time.monotonic() + _START_S
    while run.facts is None and keeper.poll() is None and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S / 5)
    early = time.monotonic() + _EARLY_S
    while run.facts is not None and run.end is None and keeper.poll() is None and time.monotonic() < early:
        time.sleep(_LOOK_EVERY_S)
    end = run.end
    if run.facts is None or (end is not None and end.status):
        said = tail(run)
        raise SessionError(f"run {run.name} ended at once: {run.state()}{said}", log=str(run.log))
    console.lines(render(run))
    return run


def render(run: DetachedRun) -> list[str]:
    """The lines of `stoker run --detach`."""
    facts = run.facts
    where = f" on {facts.host} (pid {facts.pid})" if facts is not None else ""
    return [
        f"{run.name} runs{where} and keeps running when you log out; its log is {run.log}",
        f"  follow   stoker logs {run.name} -f",
        f"  attach   stoker attach {run.name}    until it ends, with its exit status; Ctrl-C leaves it running",
        f"  stop     stoker down {run.name}",
    ]


def tail(run: DetachedRun) -> str:
    """The last lines of a run's log, indented; empty if it has none."""
    try:
        with run.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-20:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines)


def follow(run: DetachedRun) -> None:
    """Print a run's log until it ends; then exit with its exit status. Ctrl-C leaves it running."""
    try:
        with run.log.open("rb") as file:
            while True:
                was_running = run.is_running()
                while data := file.read(1 << 20):
                    console.raw(data)
                if not was_running:
                    break
                time.sleep(_LOOK_EVERY_S)
    except OSError as error:
        raise SessionError(f"{run.log} cannot be read: {error.strerror}", log=str(run.log)) from None
    except KeyboardInterrupt:
        console.note(
            f"{run.name} keeps running; stoker attach {run.name} shows it again, stoker down {run.name} stops it"
        )
        return
    facts, end = run.facts, run.end
    took = f" after {show_seconds(end.ended_at - facts.began_at)}" if facts is not None and end is not None else ""
    console.note(f"{run.name}: {run.state()}{took}")
    raise click.exceptions.Exit(end.status if end is not None else 1)


def stop(run: DetachedRun, *, wait_s: float, as_json: bool) -> None:
    """End a run's program as Ctrl-C does, and wait for its end. Raises SessionError."""
    facts = run.facts
    if run.is_running():
        if facts is None or facts.machine != machine():
            host = facts.host if facts is not None else "another host"
            raise SessionError(f"{run.name} runs on {host}: log in there and write stoker down {run.name}")
        if run.is_alive_here():  # else its keeper is about to write how it ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(facts.pid, signal.SIGTERM)
        wait_until(lambda: not run.is_running(), limit_s=wait_s)
        if run.is_running():
            raise SessionError(
                f"{run.name} has not ended within {show_seconds(wait_s)}; kill -9 {facts.pid} ends it at once"
            )
        done = f"{run.name} was stopped: {run.state()}"
    else:
        done = f"{run.name} is over: {run.state()}"
    if as_json:
        console.json(facts_of(run))
    else:
        console.line(done)


def facts_of(run: DetachedRun) -> dict[str, object]:
    """The facts of a run for `--json`."""
    end, facts = run.end, run.facts
    return {
        "run": run.name,
        "running": run.is_running(),
        "status": end.status if end is not None else None,
        "ended_at": end.ended_at if end is not None else None,
        "facts": facts,
        "log": str(run.log),
        "session": run.session,
    }


def wait_until(true: Callable[[], bool], *, limit_s: float) -> None:
    """Wait until this is true, at most `limit_s`."""
    until = time.monotonic() + limit_s
    while not true() and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
