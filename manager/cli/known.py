"""`stoker sessions`: which sessions are known here, and removing the folders of old ones that are over."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, SessionError, UnitError
from stoker.manager.cli import console, detaching, prune, runs
from stoker.manager.executor import standing
from stoker.manager.executor.begun import is_coming_up
from stoker.protocol.session import SessionFolder, holds_session, is_begun
from stoker.units import parse_seconds, show_bytes, show_seconds
from stoker.working_folder import folders_here

_OLDER = "14d"
_DAY_S = 86400.0
_ASKED_AT_ONCE = 16
_MADE_S = 60.0
"""A session is made, and its manager listens, within this."""


class SessionState(enum.Enum):
    """Whether a session goes on."""

    UP = "up"
    """Its manager is there."""
    LOST = "lost"
    """It is not over, and has no manager: `stoker attach` or `stoker down`."""
    OVER = "over"
    """It has ended."""


class KnownSession(msgspec.Struct, frozen=True):
    """A session whose folder is there. `idle_s`: the time since anything was written at the top of its folder."""

    session: str
    folder: str
    state: SessionState
    idle_s: float


@click.command(short_help="List sessions and detached runs, or remove old ones.")
@click.option("--prune", "remove", is_flag=True, help="Remove the folders of old sessions that are over.")
@click.option("--older", metavar="TIME", default=_OLDER, help=f"Old: nothing was written for TIME. [{_OLDER}]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def sessions(*, remove: bool, older: str, as_json: bool) -> None:
    """List your detached runs with their exit status, and your sessions: those in your state folder, and those of
    programs that were started in this folder.

    With --prune: remove the folders (logs, journals) of those that are over and that nobody has written to for TIME.
    A session that is up, has no manager without being over, is locked, or may have jobs left in a batch system stays.
    """
    try:
        older_s = parse_seconds(older)
    except UnitError as error:
        raise ConfigError(f"--older: {error}", key="older") from None
    found, detached_runs = known_sessions(), runs.known_runs()
    if not remove:
        if as_json:
            console.json({"sessions": found, "runs": [detaching.facts_of(run) for run in detached_runs]})
        else:
            lines = runs.render(detached_runs, now=time.time())
            console.lines(["detached runs", *lines, ""] if lines else [])
            console.lines(render(found))
        return
    for run in detached_runs:
        if not run.is_running() and runs.over_for_s(run) >= older_s:
            runs.remove(run)
            console.note(f"removed run {run.name} and its log")
    old = [each for each in found if each.state is SessionState.OVER and each.idle_s >= older_s]
    pruned = [prune.prune(SessionFolder(each.folder), each.session) for each in old]
    if as_json:
        console.json({"removed": [x for x in pruned if not x.kept], "kept": [x for x in pruned if x.kept]})
    else:
        console.lines(render_pruned(pruned, older=older))


def known_sessions() -> list[KnownSession]:
    """Every session whose folder is there, the newest first."""
    home = state_folder()
    places = [*(home / "sessions").glob("*"), *(home / "sessions.d").glob("*")]
    for here in folders_here():
        places += Path(here).glob("runinfo/*/*")
    begun = [place for place in places if is_begun(place)]
    begun += [place for place in (home / "sessions.d").glob("*") if place.is_dir() and not holds_session(place)]
    found = {place.resolve() for place in [*filter(holds_session, places), *begun]}
    newest_first = sorted((_idle_s(path), path) for path in found)
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:  # a manager on another machine may take seconds to answer
        return [each for each in pool.map(lambda one: _read_known(*one), newest_first) if each is not None]


def render(found: Sequence[KnownSession]) -> list[str]:
    """The lines of `stoker sessions`."""
    if not found:
        return ["no session is known here; `stoker up` or a program with stoker.load() starts one"]
    width = max(len(each.session) for each in found)
    out = [
        f"  {each.session:<{width}}  {each.state.value:<4}  {_show_age(each.idle_s):>11}  {each.folder}"
        for each in found
    ]
    if any(each.state is SessionState.LOST for each in found):
        out += ["", "lost: not over, and without a manager; stoker attach ID brings it back, stoker down ID ends it"]
    if any(each.state is SessionState.OVER for each in found):
        out += [
            "",
            f"stoker sessions --prune removes sessions that ended {_OLDER} ago or earlier (--older TIME: another age)",
        ]
    return out


def render_pruned(pruned: Sequence[prune.Pruned], *, older: str) -> list[str]:
    """The lines of `stoker sessions --prune`."""
    removed = [each for each in pruned if not each.kept]
    out = [f"  removed  {each.session}  {show_bytes(each.bytes):>8}  {each.folder}" for each in removed]
    out += [f"  kept     {each.session}  {each.folder}: {each.kept}" for each in pruned if each.kept]
    if not removed:
        return [
            *out,
            f"nothing was removed: no session is over for {older} or longer" if not out else "nothing was removed",
        ]
    total = show_bytes(sum(each.bytes for each in removed))
    return [*out, f"removed {len(removed)} session{'s' * (len(removed) != 1)}, {total}"]


def _read_known(idle_s: float, path: Path) -> KnownSession | None:
    """What is known of the session in a folder; None if it is damaged, or was removed meanwhile."""
    folder = SessionFolder(path)
    try:
        return KnownSession(standing.name_of(folder), str(path), _state(folder, idle_s=idle_s), idle_s)
    except SessionError:
        return None


def _state(folder: SessionFolder, *, idle_s: float) -> SessionState:
    if not folder.file.exists():  # it is just being made, or the command that made it was killed
        return SessionState.UP if idle_s < _MADE_S or is_coming_up(folder.path) else SessionState.OVER
    if standing.is_up(folder):
        return SessionState.UP
    return SessionState.LOST if standing.is_detached(folder) and not standing.over(folder) else SessionState.OVER


def _idle_s(folder: Path) -> float:
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = max(entry.lstat().st_mtime for entry in (folder, *folder.iterdir()))
    return max(0.0, time.time() - newest)


def _show_age(seconds: float) -> str:
    return f"{seconds / _DAY_S:.0f} d" if seconds >= 2 * _DAY_S else show_seconds(seconds)
