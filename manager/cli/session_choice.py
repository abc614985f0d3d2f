"""Choose the session that a command applies to. Ask the session's manager, or read the journal of an ended session.

If the command names no session, the choice is: 1. the newest session of the current folder; 2. the newest running
session; 3. the newest session. A session belongs to a folder if a program started or joined the session there
(`runinfo`), if `stoker up` ran there, or if the session's folder is inside or above that folder. A command that changes
a session (`down`, `attach`) accepts only a running session of `stoker up`. Other commands print the session's id if the
user may expect another session. They search other sessions for an unknown call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec

from stoker.config import read_python_path
from stoker.contexts.folders import state_folder
from stoker.contexts.recipe import BARE
from stoker.errors import SessionError
from stoker.manager.cli import console, runs
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.executor import detached
from stoker.manager.executor.detached import wait_for_starting_sessions
from stoker.manager.live import records
from stoker.protocol import to_client
from stoker.protocol.calls import ListedState
from stoker.protocol.ids import format_block_name
from stoker.protocol.session import SessionFolder, find_session, session_at_path
from stoker.tracebacks import user_traceback_lines

# ---- the rule of choice


SHOWN_BY_DEFAULT = "the newest session of this folder, or the newest running session, or the newest session"
CHANGED_BY_DEFAULT = "the running session; if several run, this folder's"
_PARALLEL_CHECKS = 16
_MOST_NAMED_SESSIONS = 3
_MOST_SEARCHED_SESSIONS = 8
_CANDIDATES_KEY, _NOTE_PRINTED_KEY = "stoker.manager.cli.session_choice", "stoker.manager.cli.session_choice.told"


class SessionCandidate(msgspec.Struct, frozen=True):
    session: str
    folder: Path
    is_own: bool
    is_up: bool


def session_to_show(name: str = "", *, hint: str = "--session") -> SessionFolder:
    """Return the session with this id, id prefix or folder. Without a name, choose as this module's docstring says.

    `hint`: the option or command that names another session, for a note to the user. Raises SessionError.
    """
    named = session_at_path(name)
    if named is not None:
        return named
    if run := runs.find_detached_run(name):
        if not run.session:
            when = "yet" if run.is_running() else f"({run.describe_state()})"
            raise SessionError(f"run {run.name} has loaded no session {when}; stoker logs {run.name} shows its output")
        return SessionFolder(run.session)
    candidates = _rank_candidates(name)
    if not candidates:
        try:
            return find_session(name)
        except SessionError as error:
            if hint := runs.suggest_similar_run(name):
                raise SessionError(f"no session or run {name!r} on this machine{hint}") from error
            raise
    command = click.get_current_context(silent=True)
    told_already = command.meta if command is not None else {}
    if not name and (text := describe_choice(candidates, hint=hint)) and not told_already.get(_NOTE_PRINTED_KEY):
        told_already[_NOTE_PRINTED_KEY] = True
        console.note(text)
    return SessionFolder(candidates[0].folder)


def _rank_candidates(name: str) -> list[SessionCandidate]:
    command = click.get_current_context(silent=True)
    known: dict[str, list[SessionCandidate]] = (
        command.meta.setdefault(_CANDIDATES_KEY, {}) if command is not None else {}
    )
    if name not in known:
        known[name] = sorted(_find_candidates(name), key=lambda each: 0 if each.is_own else 1 if each.is_up else 2)
    return known[name]


def session_to_change() -> SessionFolder:
    """Return the session that `stoker down` and `attach` change by default. Raises SessionError unless one matches."""
    found = [each for each in _find_candidates(detached_only=True) if each.is_up]
    if not found:
        running = ", ".join(run.name for run in runs.list_runs() if run.is_running())
        also = f"; detached runs are known by their names: {running}" if running else ""
        raise SessionError(f"no session is up; `stoker up SITE` starts one{also}")
    own = [each for each in found if each.is_own]
    if len(found) > 1 and len(own) != 1:
        names = ", ".join(sorted(each.session for each in found))
        raise SessionError(f"sessions {names} are up; name one of them")
    return SessionFolder((own or found)[0].folder)


def describe_choice(candidates: Sequence[SessionCandidate], *, hint: str) -> str:
    """Return a note that names the chosen (first) session if the user may expect another session."""
    best, *rest = candidates
    others = [each.session for each in rest if each.is_up]
    is_program = best.folder.parent.parent.name == "runinfo"
    of = "" if best.is_own or best.is_up else f", which ran in {best.folder.parents[2] if is_program else best.folder}"
    if not others:
        return f"this is session {best.session}{of}" if of else ""
    named = ", ".join(others[:_MOST_NAMED_SESSIONS]) + (
        f" and {len(others) - _MOST_NAMED_SESSIONS} more" if len(others) > _MOST_NAMED_SESSIONS else ""
    )
    of, too = ("", " too") if best.is_up else (", which is over", "")
    are = "is" if len(others) == 1 else "are"
    return f"this is session {best.session}{of}; {named} {are} up{too} ({hint} {others[0]})"


def _find_candidates(name: str = "", *, detached_only: bool = False) -> list[SessionCandidate]:
    wait_for_starting_sessions(name)
    here = None
    with contextlib.suppress(OSError):
        here = Path.cwd().resolve()
    found: list[tuple[str, SessionFolder, bool]] = []
    for place, is_own in _list_session_folders(here):
        folder = SessionFolder(place)
        with contextlib.suppress(SessionError):
            session = folder.read().session
            if session.startswith(name) and (not detached_only or detached.is_detached(folder)):
                found.append((session, folder, is_own))
    is_alone = len(found) == 1  # a single session needs no check here, because the command will ask its manager

    def is_up(folder: SessionFolder) -> bool:
        with contextlib.suppress(SessionError):
            return not folder.end_reason() if detached_only or is_alone else detached.is_manager_up(folder)
        return False

    with ThreadPoolExecutor(_PARALLEL_CHECKS) as pool:  # an unreachable host delays only its own check
        up = pool.map(is_up, [folder for _, folder, _ in found])
        return [
            SessionCandidate(session, folder.path, is_own, is_up)
            for (session, folder, is_own), is_up in zip(found, up, strict=True)
        ]


def _list_session_folders(here: Path | None) -> list[tuple[Path, bool]]:
    """Return the folder of each known session, last used first, and True if the session belongs to the folder `here`.

    A folder `runinfo` contains the sessions that programs started there, and links to sessions that they joined.
    """
    known = [*(state_folder() / "sessions").glob("*/session.json")]
    near: list[Path] = []
    if here is not None:
        near = [*here.glob("runinfo/*/*/session.json"), *here.glob("*/session.json")]
        near += [parent / "session.json" for parent in (here, *here.parents)]
    found: dict[Path, tuple[float, bool]] = {}
    for file in (*near, *known):
        with contextlib.suppress(OSError):
            folder = file.resolve(strict=True).parent
            used_at = file.stat().st_mtime
            if file in near and file.parent.is_symlink():
                used_at = max(used_at, file.parent.lstat().st_mtime)
            before, was_own = found.get(folder, (0.0, False))
            is_own = was_own or file in near or (here is not None and _belongs_to_folder(folder, here))
            found[folder] = (max(before, used_at), is_own)
    newest_first = sorted(found.items(), key=lambda item: -item[1][0])
    return [(folder, is_own) for folder, (_, is_own) in newest_first]


def _belongs_to_folder(folder: Path, here: Path) -> bool:
    if folder.is_relative_to(here) or here.is_relative_to(folder):
        return True
    with contextlib.suppress(OSError):
        session = SessionFolder(folder)
        imports_from = read_python_path(session.sites).split(os.pathsep)[0] if detached.is_detached(session) else ""
        return bool(imports_from) and Path(imports_from).resolve() == here
    return False


# ---- questions to the chosen session


Command = Callable[..., None]


def add_session_argument(*, default: str) -> Callable[[Command], Command]:
    """Add SESSION to a command, as an argument and as an option. `default`: help text about the default session."""

    def add_argument_and_option(command: Command) -> Command:
        @click.argument("session", default="")
        @click.option(
            "--session", "by_option", default="", metavar="SESSION", help=f"{_SESSION_OPTION_HELP} [{default}]"
        )
        @functools.wraps(command)
        def call(*args: Any, session: str, by_option: str, **options: Any) -> None:
            if session and by_option and session != by_option:
                raise click.UsageError(f"SESSION is {session} and --session is {by_option}; use only one of them")
            command(*args, session=session or by_option, **options)

        return call

    return add_argument_and_option


_SESSION_OPTION_HELP = "The same as the argument SESSION: the session's id, a prefix of the id, or its folder."


class SessionAnswer(msgspec.Struct, frozen=True):
    """The status of a session. `over`: why the session has ended, or empty."""

    status: to_client.Status
    over: str = ""


def read_session_status(name: str) -> tuple[SessionFolder, SessionAnswer]:
    folder = session_to_show(name)
    try:
        with Observer(folder) as observer:
            return folder, SessionAnswer(observer.status())
    except SessionEndedError as ended:
        return folder, read_last_status(folder, ended)


def read_last_status(folder: SessionFolder, ended: SessionEndedError) -> SessionAnswer:
    """Return the last status of an ended session, from its journal. Raises SessionError."""
    from stoker.manager.live.replay import status_of_ended_session

    with _explain_journal_errors(folder, ended):
        return SessionAnswer(status_of_ended_session(folder), over=str(ended))


def find_story_of_subject(name: str, subject: str) -> tuple[SessionFolder, to_client.Story, str]:
    """Return the session of a subject (such as a call), the subject's history, and why the session has ended or `""`.
    Without `name`, also search other sessions. Raises SessionError."""
    chosen = session_to_show(name)
    story, over = _read_story_of_session(chosen, subject)
    if name or story.found or is_ambiguous_subject(story):
        return chosen, story, over
    searched = [chosen.read().session]
    others = [SessionFolder(each.folder) for each in _rank_candidates("") if each.folder != chosen.path]
    for folder in others[: _MOST_SEARCHED_SESSIONS - 1]:
        with contextlib.suppress(SessionError):
            found, its_over = _read_story_of_session(folder, subject)
            session = folder.read().session
            if found.found:
                console.note(f"{subject} is not in session {searched[0]}; this is session {session} ({folder.path})")
                return folder, found, its_over
            searched.append(session)
    if len(searched) > 1:
        names = ", ".join(searched)
        headline = f"{story.headline}; searched sessions {names} (`stoker sessions` lists them, --session names one)"
        story = msgspec.structs.replace(story, headline=headline)
    return chosen, story, over


def is_ambiguous_subject(story: to_client.Story) -> bool:
    return not story.found and story.headline.startswith("could be")


def _read_story_of_session(folder: SessionFolder, subject: str) -> tuple[to_client.Story, str]:
    from stoker.manager.live.replay import complete_story_from_journal, story_of_ended_session

    try:
        with Observer(folder) as observer:
            story = observer.story(subject)
    except SessionEndedError as ended:
        with _explain_journal_errors(folder, ended):
            return story_of_ended_session(folder, subject), str(ended)
    return complete_story_from_journal(folder, subject, story), ""


def read_calls(name: str, *, limit: int, only: ListedState | None) -> tuple[to_client.Calls, str]:
    folder = session_to_show(name)
    try:
        with Observer(folder) as observer:
            return observer.calls(limit=limit, only=only), ""
    except SessionEndedError as ended:
        from stoker.manager.live.replay import calls_of_ended_session

        with _explain_journal_errors(folder, ended):
            return calls_of_ended_session(folder, limit=limit, only=only), str(ended)


def list_object_names(status: to_client.Status) -> list[str]:
    return [
        *(pilot.pilot for pilot in status.pilots),
        *(context.name for context in status.contexts if context.key != BARE.key),
        *(f"lib-{library.library}" for library in status.libraries),
        *(job.block for job in status.jobs),
        *(format_block_name(block) for block in status.blocks),
    ]


@contextlib.contextmanager
def _explain_journal_errors(folder: SessionFolder, ended: SessionEndedError) -> Iterator[None]:
    if not records.journal_exists(folder.journal):
        raise SessionError(f"{ended}, and it left no journal at {folder.journal}") from None
    try:
        yield
    except SessionError:
        raise
    except Exception as error:
        lines = user_traceback_lines(error)
        text = (
            f"{ended}, and its policy raises the same error again; stoker replay {folder.path} shows the event"
            if lines
            else f"{ended}, and its journal {folder.journal} cannot be replayed by this version of Stoker"
            f" ({type(error).__name__}: {error}); its logs: stoker logs --session {folder.path}"
        )
        raise SessionError("\n".join([text, *lines])) from error


# ---- a session that is read repeatedly


_RECHECK_ENDED_AFTER_S = 10.0
"""Seconds after which an ended session is checked again, because `stoker attach` may have restarted its manager."""


class FollowedSession:
    """A session whose status is read repeatedly. Reading continues after the manager restarts and after the session
    ends.

    Args:
        name: The session's id, a prefix of the id, or its folder. By default the session that `stoker status` shows.

    Raises:
        SessionError: The session does not exist.
    """

    def __init__(self, name: str = "") -> None:
        folder = session_to_show(name, hint="stoker dashboard")
        file = folder.read()
        self.folder = str(folder.path)
        self.session = file.session
        self.site = file.site
        self.log = str(folder.manager_log)
        self._folder: SessionFolder = folder
        self._observer: Observer | None = None
        self._ended: SessionAnswer | None = None
        self._ended_at = 0.0

    def answer(self) -> SessionAnswer:
        """Return the session's status. For an ended session, return its last status from its journal.

        Raises:
            SessionError: The manager does not answer, or the journal cannot be read.
        """
        if self._ended is not None and time.monotonic() - self._ended_at < _RECHECK_ENDED_AFTER_S:
            return self._ended
        try:
            if self._observer is None:
                self._observer = Observer(self._folder).__enter__()
            status = self._observer.status()
        except SessionEndedError as ended:
            self.close()
            if self._ended is None:
                self._ended = read_last_status(self._folder, ended)
            self._ended_at = time.monotonic()
            return self._ended
        except SessionError:
            self.close()
            raise
        self._ended = None
        return SessionAnswer(status)

    def close(self) -> None:
        """Close the connection to the manager. The next call of `answer` opens the connection again."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None
