"""A submission that outlives its terminal: a process of its own, which is heard until its jobs are submitted.

It is forked once the jobs are known to be sound, before anything that has threads is started, and holds the run folders
and the session's client like one that is waited for. What it would have shown goes into a log.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from stoker import console
from stoker.apps.prompt_tuning.options import SubmissionOptions
from stoker.apps.prompt_tuning.run import checked, submit
from stoker.console import Screen
from stoker.errors import ConfigError, StokerError


class DetachedReport(msgspec.Struct, frozen=True):
    """What the process says to the one that waits for it: that all is submitted, or what went wrong."""

    session: str = ""
    folders: tuple[str, ...] = ()
    error: str = ""


def detached(files: Sequence[Path], options: SubmissionOptions, *, json: bool) -> int:
    """Submit these jobs from a process of their own, and leave it. 0 once they are submitted.

    Raises as `run.submit` for what goes wrong until then.
    """
    checked(files, options)
    log = options.out / f"submitted-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{log}: cannot be written: {error.strerror}", file=str(log)) from None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _go_on(files, options, log=descriptor, pipe=writing)
    os.close(writing)
    os.close(descriptor)
    try:
        with os.fdopen(reading, "rb") as pipe:
            heard = pipe.read()
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    said = (
        msgspec.json.decode(heard, type=DetachedReport)
        if heard
        else DetachedReport(error=f"it ended without a word; its log is {log}")
    )
    if said.error:
        raise StokerError(said.error, log=str(log))
    if json:
        console.json({"session": said.session, "folders": said.folders, "pid": child, "log": str(log)})
        return 0
    jobs = f"{len(said.folders)} job{'s' * (len(said.folders) != 1)}"
    console.line(f"{jobs} submitted to session {said.session}; a process here (pid {child}) waits for them")
    console.lines(f"  {folder}" for folder in said.folders)
    where = "" if options.out == SubmissionOptions().out else f" {options.out}"
    console.line(f"see how they stand: stoker tune status{where}; stop them, and keep their checkpoints: kill {child}")
    return 0


def _go_on(files: Sequence[Path], options: SubmissionOptions, *, log: int, pipe: int) -> NoReturn:
    """Be the process that goes on."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for mine, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(mine, theirs)
    code = 1
    try:
        with os.fdopen(pipe, "wb") as out:

            def tell(session: str, folders: Sequence[str]) -> None:
                out.write(msgspec.json.encode(DetachedReport(session, tuple(folders))))
                out.close()

            try:
                code = submit(files, options, screen=Screen(terminal=False), json=False, submitted=tell)
            except BaseException as error:
                console.error(f"{type(error).__name__}: {error}")
                if not out.closed:
                    out.write(msgspec.json.encode(DetachedReport(error=str(error) or type(error).__name__)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
