"""Doctor's look at what earlier sessions left on disk: measurements, logs and journals. What still runs: `orphans`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.contexts.folders import state_folder
from stoker.manager.cli import known
from stoker.manager.cli.finding import Finding, Level
from stoker.manager.cli.known import SessionState
from stoker.manager.cli.prune import size_bytes
from stoker.protocol.session import holds_session, is_begun
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
    found = known.known_sessions()
    alive = [each.session for each in found if each.state is SessionState.UP]
    over = [Path(each.folder) for each in found if each.state is SessionState.OVER]
    links = sorted((state_folder() / "sessions").glob("*"))
    dangling = [link for link in links if not (holds_session(link) or is_begun(link))]
    names = f": {', '.join(alive)}" if alive else ""
    yield Finding("sessions", Level.OK, _count(len(alive), "live session", "live sessions") + names)
    for name in (each.session for each in found if each.state is SessionState.LOST):
        fix = f"bring it back: stoker attach {name}; or end it: stoker down {name}"
        yield Finding("sessions", Level.WARN, f"session {name} is not over, and has no manager", fix)
    if over:
        size = sum(map(size_bytes, over))
        keep = _count(len(over), "session that is over keeps", "sessions that are over keep")
        text = f"{keep} {show_bytes(size)} of logs and journals"
        yield Finding("sessions", Level.OK if size < 1e9 else Level.WARN, text, where_to_remove(over))
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
    return "\n".join(["stoker sessions --prune removes the old ones; or by hand (rm -r):", *lines])


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
