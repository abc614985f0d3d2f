"""Which session is meant, and asking it: the live manager, or the journal when the session is over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from stoker.contexts.recipe import BARE
from stoker.contexts.state import state_folder
from stoker.errors import SessionError
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.executor import detached
from stoker.manager.live import segments
from stoker.manager.live.interfaces import is_listening
from stoker.manager.protocol import to_client
from stoker.manager.protocol.ids import show_block
from stoker.manager.protocol.listed import ListedState
from stoker.manager.protocol.session import SessionFolder, changed_at, find_session

Command = Callable[..., None]
NEWEST = "the newest; one that is up comes first"
"""What a command that only looks means when no session is named."""
UP = "the one that is up, unless there are several"
"""What a command that changes something means then."""


def takes_session(*, default: str) -> Callable[[Command], Command]:
    """A command of one session: it takes SESSION behind its other arguments or as an option, and gets it as `session`.
    `default`: which one it means when none is named, in words."""

    def with_both(command: Command) -> Command:
        @click.argument("session", default="")
        @click.option("--session", "by_option", default="", metavar="SESSION", help=f"{_NAMES} [{default}]")
        @functools.wraps(command)
        def call(*args: Any, session: str, by_option: str, **options: Any) -> None:
            if session and by_option and session != by_option:
                raise click.UsageError(f"SESSION is {session} and --session is {by_option}; give one of them")
            command(*args, session=session or by_option, **options)

        return call

    return with_both


_NAMES = "The same as the argument SESSION: its id, a beginning of it, or its folder."


class Answer(msgspec.Struct, frozen=True):
    """What a session said. `over` says in words that it has ended, and is empty for one that lives."""

    status: to_client.Status
    over: str = ""


def status_of(name: str) -> tuple[SessionFolder, Answer]:
    """The status of a session, live or over. Raises SessionError."""
    folder = find(name)
    try:
        with Observer(folder) as observer:
            return folder, Answer(observer.status())
    except SessionEndedError as ended:
        from stoker.manager.live.replay import status_of_ended_session

        with _from_journal(folder, ended):
            return folder, Answer(status_of_ended_session(folder), over=str(ended))


def story_of(name: str, subject: str) -> tuple[SessionFolder, to_client.Story, str]:
    """The story of a subject; and, of a session that is over, that it is. Raises SessionError.

    A live manager forgets calls that ended well; its journal remembers them.
    """
    from stoker.manager.core.story import IN_JOURNAL
    from stoker.manager.live.replay import story_of_ended_session

    folder = find(name)
    try:
        with Observer(folder) as observer:
            story = observer.story(subject)
    except SessionEndedError as ended:
        with _from_journal(folder, ended):
            return folder, story_of_ended_session(folder, subject), str(ended)
    if not story.found and segments.exists(folder.journal):
        kept = story_of_ended_session(folder, subject)
        story = kept if kept.found or story.headline == IN_JOURNAL else story
    return folder, story, ""


def calls_of(name: str, *, limit: int, only: ListedState | None) -> tuple[to_client.Calls, str]:
    """Calls of a session; and, of one that is over, that it is. Raises SessionError."""
    folder = find(name)
    try:
        with Observer(folder) as observer:
            return observer.calls(limit=limit, only=only), ""
    except SessionEndedError as ended:
        from stoker.manager.live.replay import calls_of_ended_session

        with _from_journal(folder, ended):
            return calls_of_ended_session(folder, limit=limit, only=only), str(ended)


def find(name: str = "") -> SessionFolder:
    """The session that is meant: by its path, or the newest of that id (or a beginning of one; empty: any). One that is
    not over comes first: a program that ended a minute ago is not what a session that is up should stand behind.

    The last ones are known by links in the state folder, older ones if they were started from this folder.
    Raises SessionError.
    """
    if name and (Path(name) / "session.json").exists():
        return SessionFolder(name)
    places = [*(state_folder() / "sessions").glob("*/session.json"), *Path.cwd().glob("runinfo/*/*/session.json")]
    found: list[SessionFolder] = []
    for _, place in sorted(((changed_at(place), place.resolve().parent) for place in places), reverse=True):
        folder = SessionFolder(place)
        with contextlib.suppress(SessionError):
            if folder.read().session.startswith(name):
                found.append(folder)
    if not found:
        return find_session(name)
    return next(filter(_lives, found), found[0])


def _lives(folder: SessionFolder) -> bool:
    with contextlib.suppress(SessionError):
        return not detached.over(folder) and is_listening(folder.read().address)
    return False


def the_one_that_is_up() -> SessionFolder:
    """The session that stays (`stoker up`) and is not over, if there is one alone. Raises SessionError."""
    found: dict[str, SessionFolder] = {}
    for link in sorted((state_folder() / "sessions").glob("*")):
        folder = SessionFolder(link.resolve())
        if folder.file.exists() and detached.is_detached(folder) and not detached.over(folder):
            found[folder.read().session] = folder
    if not found:
        raise SessionError("no session is up; `stoker up SITE` starts one")
    if len(found) > 1:
        raise SessionError(f"sessions {', '.join(found)} are up; say which one")
    return next(iter(found.values()))


def names_in(status: to_client.Status) -> list[str]:
    """What can be asked about beside calls: pilots, contexts, libraries, blocks."""
    return [
        *(pilot.pilot for pilot in status.pilots),
        *(context.name for context in status.contexts if context.key != BARE.key),
        *(f"lib-{library.library}" for library in status.libraries),
        *(job.block for job in status.jobs),
        *(show_block(block) for block in status.blocks),
    ]


@contextlib.contextmanager
def _from_journal(folder: SessionFolder, ended: SessionEndedError) -> Iterator[None]:
    """Whatever a journal of another version, or a damaged one, does to the replay becomes one line."""
    if not segments.exists(folder.journal):
        raise SessionError(f"{ended}, and it left no journal at {folder.journal}") from None
    try:
        yield
    except SessionError:
        raise
    except Exception as error:
        from stoker.manager.live.raised import raised

        lines = raised(error)
        if lines:
            text = f"{ended}, and its policy raises where it did then; stoker replay {folder.path} says at which event"
            raise SessionError("\n".join([text, *lines])) from error
        raise SessionError(
            f"{ended}, and its journal {folder.journal} cannot be replayed by this version of Stoker"
            f" ({type(error).__name__}: {error}); its logs are there: stoker logs --session {folder.path}"
        ) from error
