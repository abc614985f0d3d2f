"""Which session a command means when none is named: one rule for all commands.

The sessions of this folder come before others: those whose folder lies in the folder where the command is typed, or
that this folder lies in (`runinfo/000/stoker` of a program's folder, and the folder itself). So:

1. this folder's newest session that is up;
2. the newest session that is up;
3. this folder's newest session, then the newest of all. Both are over.

A command that changes a session (`down`, `attach`) takes only one of `stoker up` that is not over. Of several it takes
this folder's; if that leaves more than one, it asks. The other commands say on stderr which session they took, if
another one is up too, or this folder has sessions that are over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from stoker.contexts.state import state_folder
from stoker.errors import SessionError
from stoker.manager.cli import console, runs
from stoker.manager.executor import standing
from stoker.manager.executor.begun import wait_for_begun
from stoker.manager.protocol.session import SessionFolder, find_session, named_folder

SHOWN_BY_DEFAULT = "the one of this folder if it is up, else the newest that is up, else this folder's newest"
"""Which session a command means that only looks."""
CHANGED_BY_DEFAULT = "the one that is up; of several this folder's"
"""Which session a command means that changes it."""
_ASKED_AT_ONCE = 16
_CHOSEN = "stoker.manager.cli.choosing"


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
    command = click.get_current_context(silent=True)
    chosen: dict[str, SessionFolder] = command.meta.setdefault(_CHOSEN, {}) if command is not None else {}
    if name not in chosen:
        candidates = _candidates(name)
        if not candidates:
            return _find(name)
        best = first(candidates)
        chosen[name] = SessionFolder(best.folder)
        if not name and (text := told(best, candidates, hint=hint)):
            console.note(text)
    return chosen[name]


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


def first(candidates: Sequence[SessionCandidate]) -> SessionCandidate:
    """The session that is meant; `candidates` are sorted, the newest first."""
    return min(candidates, key=lambda each: (not each.is_up, not each.is_own))


def told(best: SessionCandidate, candidates: Sequence[SessionCandidate], *, hint: str) -> str:
    """What to say of the choice; empty where there was none."""
    others = [each.session for each in candidates if each.is_up and each is not best]
    passed = next((each.session for each in candidates if each.is_own), "") if not best.is_own else ""
    if not others and not passed:
        return ""
    reasons = [f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} up too"] if others else []
    if passed and passed not in others:
        reasons.append(f"{passed} of this folder is over")
    other = (others or [passed])[0]
    return f"this is session {best.session}; {', and '.join(reasons)} ({hint} {other})"


def _candidates(name: str = "", *, detached_only: bool = False) -> list[SessionCandidate]:
    """Sessions that are known here and whose id begins so, the newest first."""
    wait_for_begun(name)
    here = _here()
    found: list[tuple[str, SessionFolder]] = []
    for place in _folders(here):
        folder = SessionFolder(place)
        with contextlib.suppress(SessionError):
            session = folder.read().session
            if session.startswith(name) and (not detached_only or standing.is_detached(folder)):
                found.append((session, folder))
    is_alone = len(found) == 1  # it is meant whether its manager is there or not, and the command asks that anyway
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:  # a host that is away answers late
        up = pool.map(_is_not_over if detached_only or is_alone else _is_up, [folder for _, folder in found])
        return [
            SessionCandidate(session, folder.path, here is not None and _belong(folder.path, here), is_up)
            for (session, folder), is_up in zip(found, up, strict=True)
        ]


def _belong(folder: Path, here: Path) -> bool:
    return folder.is_relative_to(here) or here.is_relative_to(folder)


def _folders(here: Path | None) -> list[Path]:
    """Folders of sessions: the last ones are known by links in the state folder, older ones if they lie here."""
    files = [*(state_folder() / "sessions").glob("*/session.json")]
    if here is not None:
        files += [*here.glob("runinfo/*/*/session.json"), *here.glob("*/session.json")]
        files += [parent / "session.json" for parent in (here, *here.parents)]
    found: dict[Path, float] = {}
    for file in files:
        with contextlib.suppress(OSError):  # gone meanwhile
            found[file.resolve().parent] = file.stat().st_mtime
    return sorted(found, key=lambda folder: found[folder], reverse=True)


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
