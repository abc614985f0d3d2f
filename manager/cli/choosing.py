"""Which session a command means when none is named: one rule for all commands.

The newest session of this folder comes first, also after it ended: a user who types `stoker explain c-0` means the
program that ran here last. A session is of this folder if a program started it or joined it here (`runinfo`), if
`stoker up` was typed here, or if its own folder lies here or around here. Then follow the newest session that is up
and the newest of all. So:

1. this folder's newest session;
2. the newest session that is up;
3. the newest session.

A command that changes a session (`down`, `attach`) takes only one of `stoker up` that is not over. Of several it takes
this folder's; if that leaves more than one, it asks. The other commands say on stderr which session they took, if
another one is up or they took one of another folder that is over. A command that is asked about a call, and does not
find it, searches the other sessions in the same order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from stoker.contexts.folders import state_folder
from stoker.errors import SessionError
from stoker.manager.cli import console, runs
from stoker.manager.executor import standing
from stoker.manager.executor.begun import wait_for_begun
from stoker.protocol.session import SessionFolder, find_session, named_folder
from stoker.site_files import read_python_path

SHOWN_BY_DEFAULT = "the newest of this folder, else the newest that is up, else the newest"
"""Which session a command means that only looks."""
CHANGED_BY_DEFAULT = "the one that is up; of several this folder's"
"""Which session a command means that changes it."""
_ASKED_AT_ONCE = 16
_SEARCHED = 8
"""The most sessions to search for a call. Reading the journal of an ended session can take seconds."""
_CHOSEN = "stoker.manager.cli.choosing"
_TOLD = "stoker.manager.cli.choosing.told"


class SessionCandidate(msgspec.Struct, frozen=True):
    """A session that may be meant. `is_own`: it belongs to the folder where the command was typed."""

    session: str
    folder: Path
    is_own: bool
    is_up: bool


def session_to_show(name: str = "", *, hint: str = "--session") -> SessionFolder:
    """The session that a command looks at: by its folder, its id or a beginning of one; without a name, by the rule
    above. A command that asks twice gets the same one. `hint`: what a person types before the name of another one.
    Raises SessionError."""
    named = named_folder(name)
    if named is not None:
        return named
    if run := runs.named_run(name):
        if not run.session:
            raise SessionError(f"run {run.name} has loaded no session yet; stoker logs {run.name} shows what it says")
        return SessionFolder(run.session)
    candidates = _ranked(name)
    if not candidates:
        return _find(name)
    best = candidates[0]
    command = click.get_current_context(silent=True)
    if not name and (text := told(best, candidates, hint=hint)):
        if command is None or not command.meta.get(_TOLD):
            console.note(text)
        if command is not None:
            command.meta[_TOLD] = True
    return SessionFolder(best.folder)


def others_to_search(chosen: SessionFolder) -> list[SessionFolder]:
    """Return the sessions to search next for a call that the `chosen` one does not know, best first."""
    return [SessionFolder(each.folder) for each in _ranked("") if each.folder != chosen.path][: _SEARCHED - 1]


def _ranked(name: str) -> list[SessionCandidate]:
    """Return the sessions whose id begins so, in the order in which they are meant. A command that asks twice gets the
    same answer."""
    command = click.get_current_context(silent=True)
    known: dict[str, list[SessionCandidate]] = command.meta.setdefault(_CHOSEN, {}) if command is not None else {}
    if name not in known:
        known[name] = ranked(_candidates(name))
    return known[name]


def session_to_change() -> SessionFolder:
    """The session that a command changes which names none. Raises SessionError if there is none, or no one alone."""
    found = [each for each in _candidates(detached_only=True) if each.is_up]
    own = [each for each in found if each.is_own]
    if not found:
        running = [run.name for run in runs.known_runs() if run.is_running()]
        also = f"; detached runs are known by their names: {', '.join(running)}" if running else ""
        raise SessionError(f"no session is up; `stoker up SITE` starts one{also}")
    if len(found) > 1 and len(own) != 1:
        names = ", ".join(sorted(each.session for each in found))
        raise SessionError(f"sessions {names} are up; say which one")
    return SessionFolder((own or found)[0].folder)


def _find(name: str) -> SessionFolder:
    try:
        return find_session(name)
    except SessionError as error:
        if hint := runs.near_runs(name):
            raise SessionError(f"no session or run {name!r} on this machine{hint}") from error
        raise


def ranked(candidates: Sequence[SessionCandidate]) -> list[SessionCandidate]:
    """Sort sessions by the rule above; `candidates` are sorted, the newest first."""
    return sorted(candidates, key=lambda each: (not each.is_own, not each.is_up and not each.is_own))


def told(best: SessionCandidate, candidates: Sequence[SessionCandidate], *, hint: str) -> str:
    """Return what to say of the choice; empty if the user expects it."""
    others = [each.session for each in candidates if each.is_up and each is not best]
    of = "" if best.is_own or best.is_up else f", which ran in {_ran_in(best.folder)}"
    if not others:
        return f"this is session {best.session}{of}" if of else ""
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    named = f"{', '.join(others[:_NAMED])}{more}"
    of, too = ("", " too") if best.is_up else (", which is over", "")
    are = "is" if len(others) == 1 else "are"
    return f"this is session {best.session}{of}; {named} {are} up{too} ({hint} {others[0]})"


_NAMED = 3


def _ran_in(folder: Path) -> Path:
    """Return the program's folder, which holds `runinfo`; of a session elsewhere its own folder."""
    return folder.parents[2] if folder.parent.parent.name == "runinfo" else folder


def _candidates(name: str = "", *, detached_only: bool = False) -> list[SessionCandidate]:
    """Return the sessions that are known here and whose id begins so, the newest first."""
    wait_for_begun(name)
    here = _here()
    found: list[tuple[str, SessionFolder, bool]] = []
    for place, is_own in _folders(here):
        folder = SessionFolder(place)
        with contextlib.suppress(SessionError):
            session = folder.read().session
            if session.startswith(name) and (not detached_only or standing.is_detached(folder)):
                found.append((session, folder, is_own))
    is_alone = len(found) == 1  # it is meant whether its manager is there or not, and the command asks that anyway
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:  # a host that is away answers late
        up = pool.map(_is_not_over if detached_only or is_alone else _is_up, [folder for _, folder, _ in found])
        return [
            SessionCandidate(session, folder.path, is_own, is_up)
            for (session, folder, is_own), is_up in zip(found, up, strict=True)
        ]


def _folders(here: Path | None) -> list[tuple[Path, bool]]:
    """Return the folders of sessions, the last used first, and whether each is of this folder.

    The last ones are known by links in the state folder, older ones if they lie here. A program that joins a session
    leaves a link to it in its `runinfo`.
    """
    known = [*(state_folder() / "sessions").glob("*/session.json")]
    near: list[Path] = []
    if here is not None:
        near = [*here.glob("runinfo/*/*/session.json"), *here.glob("*/session.json")]
        near += [parent / "session.json" for parent in (here, *here.parents)]
    found: dict[Path, tuple[float, bool]] = {}
    for file in (*near, *known):
        with contextlib.suppress(OSError):  # gone meanwhile
            folder = file.resolve(strict=True).parent
            used_at = file.stat().st_mtime
            if file in near and file.parent.is_symlink():
                used_at = max(used_at, file.parent.lstat().st_mtime)
            before, was_own = found.get(folder, (0.0, False))
            is_own = was_own or file in near or (here is not None and _is_of(folder, here))
            found[folder] = (max(before, used_at), is_own)
    return [(folder, found[folder][1]) for folder in sorted(found, key=lambda each: found[each][0], reverse=True)]


def _is_of(folder: Path, here: Path) -> bool:
    """True if a session's folder lies in this folder or around it, or `stoker up` made the session here."""
    if folder.is_relative_to(here) or here.is_relative_to(folder):
        return True
    with contextlib.suppress(OSError):
        session = SessionFolder(folder)
        imports_from = read_python_path(session.sites).split(os.pathsep)[0] if standing.is_detached(session) else ""
        return bool(imports_from) and Path(imports_from).resolve() == here
    return False


def _here() -> Path | None:
    """The folder where the command was typed; None if it was removed."""
    try:
        return Path.cwd().resolve()
    except OSError:
        return None


def _is_not_over(folder: SessionFolder) -> bool:
    with contextlib.suppress(SessionError):
        return not standing.over(folder)
    return False


def _is_up(folder: SessionFolder) -> bool:
    with contextlib.suppress(SessionError):
        return standing.is_up(folder)
    return False
