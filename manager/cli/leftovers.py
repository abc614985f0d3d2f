"""Doctor's look at what earlier sessions left: measurements, dead sessions, orphaned processes."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from stoker.contexts.state import state_folder
from stoker.errors import SessionError
from stoker.manager.cli.finding import Finding, Level
from stoker.manager.cli.left import ours
from stoker.manager.executor import detached
from stoker.manager.live.interfaces import is_listening
from stoker.manager.protocol.session import SessionFolder
from stoker.units import show_bytes

STORE = "performance.sqlite"


def store() -> Iterator[Finding]:
    """The measurements of earlier runs."""
    path = state_folder() / STORE
    if not path.exists():
        yield Finding("store", Level.OK, f"no measurements yet: the first run makes {path}")
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            verdict = db.execute("PRAGMA quick_check").fetchone()[0]
            count = db.execute("SELECT count(DISTINCT recipe) FROM measured").fetchone()[0]
    except sqlite3.Error as error:
        verdict, count = str(error), 0
    if verdict == "ok":
        yield Finding("store", Level.OK, f"measurements of {_count(count, 'context', 'contexts')} in {path}")
    else:
        fix = f"move it away, it is made anew: mv {path} {path}.damaged"
        yield Finding("store", Level.WARN, f"measurements cannot be read: {path}: {verdict}", fix)


def sessions() -> Iterator[Finding]:
    """Sessions that are known here: alive, over, or gone without a trace."""
    alive: list[tuple[str, Path]] = []
    over: list[tuple[str, Path]] = []
    lost: list[str] = []
    dangling: list[Path] = []
    for link in sorted((state_folder() / "sessions").glob("*")):
        folder = SessionFolder(link.resolve())
        try:
            file = folder.read()
        except SessionError:
            dangling.append(link)
            continue
        if is_listening(file.address):
            alive.append((file.session, folder.path))
        elif detached.is_detached(folder) and not detached.over(folder):
            lost.append(file.session)
        else:
            over.append((file.session, folder.path))
    names = f": {', '.join(name for name, _ in alive)}" if alive else ""
    yield Finding("sessions", Level.OK, _count(len(alive), "live session", "live sessions") + names)
    for name in lost:
        fix = f"bring it back: stoker attach {name}; or end it: stoker down {name}"
        yield Finding("sessions", Level.WARN, f"session {name} is not over, and has no manager", fix)
    if over:
        size = sum(_size(path) for _, path in over)
        keep = _count(len(over), "session that is over keeps", "sessions that are over keep")
        text = f"{keep} {show_bytes(size)} of logs and journals"
        yield Finding(
            "sessions", Level.OK if size < 1e9 else Level.WARN, text, where_to_remove([path for _, path in over])
        )
    if dangling:
        fix = "rm " + " ".join(map(str, dangling))
        yield Finding(
            "sessions",
            Level.WARN,
            _count(len(dangling), "link to a session whose folder is gone", "links to sessions whose folders are gone"),
            fix,
        )


def where_to_remove(folders: Sequence[Path]) -> str:
    """What to do about session folders that nobody needs, a line a place that they lie in."""
    places: dict[Path, list[Path]] = {}
    for folder in folders:
        run = folder.parent if folder.parent.parent.name == "runinfo" else folder
        places.setdefault(run.parent, []).append(run)
    lines = []
    for place, runs in places.items():
        names = runs[0].name if len(runs) == 1 else f"{runs[0].name} … {runs[-1].name}"
        lines.append(f"  {place}: {_count(len(runs), 'folder', 'folders')}, {names}")
    return "\n".join(["when you need them no more, remove them (rm -r):", *lines])


def processes() -> Iterator[Finding]:
    """Managers and pilots of this user that run on although their session's folder is gone or nobody listens there."""
    orphans = list(orphaned())
    if orphans:
        what = ", ".join(f"{each.kind} {each.pid} of {each.folder}" for each in orphans)
        fix = "kill " + " ".join(str(each.pid) for each in orphans)
        yield Finding("processes", Level.WARN, f"left behind: {what}", fix)
    else:
        yield Finding("processes", Level.OK, "no process was left behind")


class Orphan(msgspec.Struct, frozen=True):
    """A process of a session that is no more."""

    pid: int
    kind: str
    folder: str


def orphaned() -> Iterator[Orphan]:
    """The orphans on this machine. A pilot still within its lease is one too: it will end by itself, but not yet."""
    for process, kind, path in ours():
        folder = SessionFolder(path)
        try:
            alive = is_listening(folder.read().address)
        except SessionError:
            alive = False
        if not alive and psutil.pid_exists(process.pid):
            yield Orphan(process.pid, kind, str(folder.path))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total
