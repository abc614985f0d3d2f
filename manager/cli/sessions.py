"""`stoker sessions`: list and remove sessions. `stoker caches`: show and remove the pilots' caches here."""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, SessionError, UnitError
from stoker.folders import working_folder_if_exists
from stoker.manager.cli import console, runs, session_remains
from stoker.manager.cli.session_remains import size_bytes
from stoker.manager.executor import detached
from stoker.manager.executor.detached import is_session_starting
from stoker.pilot.agent.scratch import base_folder, remove_folders_of_dead_pilots
from stoker.pilot.cache import ObjectCache, store
from stoker.pilot.starter.place import Environments
from stoker.protocol.session import SessionFolder, is_session_folder, is_starting, modification_time
from stoker.site import Site
from stoker.units import parse_seconds, show_bytes, show_seconds

# ---- stoker sessions


_DEFAULT_AGE = "14d"
_DAY_S = 86400.0
_PARALLEL_CHECKS = 16
_START_LIMIT_S = 60.0
"""Seconds for which a new session without a listening manager counts as starting."""


class SessionState(enum.Enum):
    """The state of a session. `LOST`: the session has not ended, but its manager has; `stoker attach` restarts it."""

    UP = "up"
    LOST = "lost"
    OVER = "over"


class KnownSession(msgspec.Struct, frozen=True):
    """A session whose folder exists. `idle_s`: seconds since the last write to the folder."""

    session: str
    folder: str
    state: SessionState
    idle_s: float


@click.command(short_help="List sessions and detached runs, or remove old ones.")
@click.option("--prune", "remove", is_flag=True, help="Remove the folders of old sessions that are over.")
@click.option(
    "--older",
    metavar="TIME",
    default=_DEFAULT_AGE,
    help=f"A session is old if nothing was written for TIME. [{_DEFAULT_AGE}]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def sessions(*, remove: bool, older: str, as_json: bool) -> None:
    """List your detached runs with their exit status, your sessions in the state folder, and sessions of programs
    started in this folder.

    With --prune: remove the folders (logs, journals) of ended sessions that were last written TIME ago or earlier. A
    session stays if it is locked or if a batch system may still have its jobs.
    """
    try:
        older_s = parse_seconds(older)
    except UnitError as error:
        raise ConfigError(f"--older: {error}", key="older") from None
    found, detached_runs = list_sessions(), runs.list_runs()
    if not remove:
        if as_json:
            console.json({"sessions": found, "runs": [runs.run_to_json(run) for run in detached_runs]})
        else:
            lines = [f"  {run.describe(now=time.time())}" for run in detached_runs]
            console.lines(["detached runs", *lines, ""] if lines else [])
            console.lines(render_sessions(found))
        return
    for run in detached_runs:
        written_at = max(map(modification_time, (run.path, run.log)))
        if not run.is_running() and time.time() - written_at >= older_s:
            shutil.rmtree(run.path, ignore_errors=True)
            console.note(f"removed run {run.name} and its log")
    old = [each for each in found if each.state is SessionState.OVER and each.idle_s >= older_s]
    pruned = [session_remains.prune_session(SessionFolder(each.folder), each.session) for each in old]
    if as_json:
        console.json({"removed": [x for x in pruned if not x.kept], "kept": [x for x in pruned if x.kept]})
    else:
        console.lines(render_pruned(pruned, older=older))


def list_sessions() -> list[KnownSession]:
    home = state_folder()
    places = [*(home / "sessions").glob("*"), *(home / "sessions.d").glob("*")]
    for here in working_folder_if_exists():
        places += Path(here).glob("runinfo/*/*")
    begun = [place for place in places if is_starting(place)]
    begun += [place for place in (home / "sessions.d").glob("*") if place.is_dir() and not is_session_folder(place)]
    found = {place.resolve() for place in [*filter(is_session_folder, places), *begun]}
    newest_first = sorted((_idle_s(path), path) for path in found)
    with ThreadPoolExecutor(_PARALLEL_CHECKS) as pool:  # each check may take seconds
        return [each for each in pool.map(_read_known_session, newest_first) if each is not None]


def render_sessions(found: Sequence[KnownSession]) -> list[str]:
    if not found:
        return ["no session is known here; `stoker up` or a program with stoker.load() starts one"]
    width = max(len("session"), *(len(each.session) for each in found))
    out = [f"  {'session':<{width}}  state  {'unused for':>11}  folder"]
    out += [
        f"  {each.session:<{width}}  {each.state.value:<5}  {_show_age(each.idle_s, '.0f', 'd'):>11}  {each.folder}"
        for each in found
    ]
    hints = {
        SessionState.LOST: "lost: its manager has ended; stoker attach ID restarts it, stoker down ID ends the session",
        SessionState.OVER: f"stoker sessions --prune removes sessions that ended {_DEFAULT_AGE} ago (--older TIME)",
    }
    states = {each.state for each in found}
    return out + [line for state, hint in hints.items() if state in states for line in ("", hint)]


def render_pruned(pruned: Sequence[session_remains.PruneResult], *, older: str) -> list[str]:
    removed = [each for each in pruned if not each.kept]
    out = [f"  removed  {each.session}  {show_bytes(each.bytes):>8}  {each.folder}" for each in removed]
    out += [f"  kept     {each.session}  {each.folder}: {each.kept}" for each in pruned if each.kept]
    if removed:
        total = show_bytes(sum(each.bytes for each in removed))
        return [*out, f"removed {console.format_count(len(removed), 'session')}, {total}"]
    return [*out, "nothing was removed" if out else f"nothing was removed: no session ended {older} ago or earlier"]


def _read_known_session(idle_s_and_path: tuple[float, Path]) -> KnownSession | None:
    idle_s, path = idle_s_and_path
    folder = SessionFolder(path)
    try:
        if not folder.file.exists():  # the session is starting, or its command was killed
            up, lost = idle_s < _START_LIMIT_S or is_session_starting(path), False
        else:
            up = detached.is_manager_up(folder)
            lost = not up and detached.is_detached(folder) and not folder.end_reason()
        state = SessionState.UP if up else SessionState.LOST if lost else SessionState.OVER
        return KnownSession(detached.session_name(folder), str(path), state, idle_s)
    except SessionError:
        return None


def _idle_s(folder: Path) -> float:
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = max(map(modification_time, (folder, *folder.iterdir())))
    return max(0.0, time.time() - newest)


def _show_age(seconds: float, form: str, days: str) -> str:
    return f"{seconds / _DAY_S:{form}} {days}" if seconds >= 2 * _DAY_S else show_seconds(seconds)


# ---- stoker caches


_CACHE_HINT = "kept for the next session; old files are removed automatically; to remove all now: stoker caches --clear"


class CacheContents(msgspec.Struct, frozen=True):
    host: str
    folder: str
    bytes: int
    removed_bytes: int = 0


@click.command(short_help="Show or remove the files that pilots keep on this machine.")
@click.option("--clear", is_flag=True, help="Remove the files, except those that a pilot uses.")
@click.option("--scratch", metavar="DIR", default="", help="Look in this folder: [pilot] scratch of the site file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def caches(*, clear: bool, scratch: str, as_json: bool) -> None:
    """Show the files that pilots keep on this machine for the next session: fetched objects and environments.

    [pilot] cache_size limits the size of these files, and unused files expire after cache_age. On a compute node: srun
    -w n014 stoker caches --clear
    """
    kept = clean_node_caches(scratch, clear=clear)
    if as_json:
        console.json(kept)
    else:
        where, size = f"{kept.folder} on {kept.host}", show_bytes(kept.bytes)
        rest = f"; {size} are in use" if kept.bytes else ""
        removed = f"{where}: {show_bytes(kept.removed_bytes)} removed{rest}"
        console.lines([removed] if clear else [f"{where}: {size}", *([_CACHE_HINT] if kept.bytes else [])])


def clean_node_caches(scratch: str = "", *, clear: bool = False) -> CacheContents:
    """Remove expired unused files from the pilots' caches here, or with `clear` all unused files. Return the remaining
    and removed bytes. Raises StokerError."""
    place = Path(os.path.expandvars(scratch)).expanduser()
    if scratch and not place.is_dir() and not str(place).startswith("$"):
        where = f"--scratch: there is no folder {place} on {socket.gethostname()}"
        raise ConfigError(f"{where}; name the folder of [pilot] scratch in the site file", key="scratch")
    base = base_folder(scratch)
    before = size_bytes(base)
    kept_s = 0.0 if clear else float("inf")
    if (base / "cache").is_dir():
        cache = ObjectCache(base / "cache", capacity_bytes=0, max_unused_s=kept_s)
        store.remove_evicted_snapshots(cache)
        if clear:
            remove_folders_of_dead_pilots(base)
            if not any(base.glob("pilot-*")):  # a library of a live pilot may be loading a snapshot
                store.remove_stale_snapshots(cache, max_unused_s=0.0)
    if (base / "environments").is_dir():
        Environments(base, max_unused_s=kept_s).remove_unused()
    after = size_bytes(base)
    return CacheContents(socket.gethostname(), str(base), after, before - after)


def describe_remaining_files(sites: Iterable[Site]) -> list[str]:
    """Return messages about the files that a session leaves on compute nodes."""
    places: dict[str, dict[str, None]] = {}
    for site in sites:
        age = _show_age(site.pilot.cache_age_s, ".3g", "days")
        places.setdefault(age, {})[site.pilot.scratch or "their temporary folder"] = None
    return [
        f"files that its pilots fetched stay on their nodes ({', '.join(here)}) for the next session, and are removed"
        f" after {age} without use; to remove them now, run on the node: stoker caches --clear"
        for age, here in places.items()
    ]
