"""Doctor's look at what runs on of sessions that are over: processes on this machine, jobs in batch systems.

A session is over when it says so, when its folder is gone, or when it belonged to a program and its manager is dead (a
program that lives starts it again at once). One that stays can be brought back, and a manager on another machine may
live: what such sessions run is theirs, as is everything that is no session's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from stoker.contexts.folders import state_folder
from stoker.errors import StokerError
from stoker.manager.cli import left
from stoker.manager.cli.finding import Finding, Level
from stoker.manager.executor import standing
from stoker.manager.live import lease
from stoker.protocol.session import SessionFolder

_PATIENCE_S = 3.0
"""So long a session takes to end, and a program to start its manager again, when that was killed."""


def processes() -> Iterator[Finding]:
    """Processes on this machine of sessions that are over."""
    if found := list(orphaned()):
        what = ", ".join(f"{each.kind} {each.pid} of {each.folder}" for each in found)
        fix = "kill " + " ".join(str(each.pid) for each in found)
        yield Finding("processes", Level.WARN, f"left behind: {what}", fix)
    else:
        yield Finding("processes", Level.OK, "no process was left behind")


def jobs() -> Iterator[Finding]:
    """Jobs that batch systems still have of sessions that are known here and over."""
    for link in sorted((state_folder() / "sessions").glob("*")):
        folder = SessionFolder(link.resolve())
        if standing.over(folder) and left.may_have_jobs(folder):
            yield from (
                Finding("jobs", Level.WARN, f"left behind: {each.what}, of session {link.name}", each.remove)
                for each in left.jobs(folder, None)
            )


class OrphanProcess(msgspec.Struct, frozen=True):
    """A process of a session that is no more."""

    pid: int
    kind: str
    folder: str


def orphaned() -> Iterator[OrphanProcess]:
    """The orphans on this machine. A pilot still within its lease is one too: it will end by itself, but not yet."""
    found = list(left.own_processes())
    gone = _gone(found)
    if any(path.exists() for path in gone):
        time.sleep(_PATIENCE_S)
        gone &= _gone(found)
    for process, kind, path in found:
        if path in gone and process.is_running():
            yield OrphanProcess(process.pid, kind, str(path))


def _gone(found: Sequence[tuple[psutil.Process, str, Path]]) -> set[Path]:
    """Those of their sessions that nobody goes on with."""
    managed = {path for process, kind, path in found if kind == "manager" and process.is_running()}
    return {path for path in {path for _, _, path in found} if _is_over(path) or (path not in managed and _died(path))}


def _is_over(path: Path) -> bool:
    return not path.exists() or bool(standing.over(SessionFolder(path)))


def _died(path: Path) -> bool:
    """Whether the session belonged to a program, and its manager is dead."""
    folder = SessionFolder(path)
    try:
        holder = lease.read(lease.lease_file(folder))
        return holder is not None and lease.is_alive(holder) is False and not standing.is_detached(folder)
    except (OSError, StokerError):
        return False
