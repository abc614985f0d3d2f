"""Which session is meant, and asking it: the live manager, or the journal when the session is over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec

from stoker.contexts.recipe import BARE
from stoker.errors import SessionError
from stoker.manager.cli import choosing, console
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.live import segments
from stoker.manager.live.raised import raised
from stoker.protocol import to_client
from stoker.protocol.ids import show_block
from stoker.protocol.listed import ListedState
from stoker.protocol.session import SessionFolder

Command = Callable[..., None]


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


class SessionAnswer(msgspec.Struct, frozen=True):
    """What a session said. `over` says in words that it has ended, and is empty for one that lives."""

    status: to_client.Status
    over: str = ""


def status_of(name: str) -> tuple[SessionFolder, SessionAnswer]:
    """The status of a session, live or over. Raises SessionError."""
    folder = choosing.session_to_show(name)
    try:
        with Observer(folder) as observer:
            return folder, SessionAnswer(observer.status())
    except SessionEndedError as ended:
        from stoker.manager.live.replay import status_of_ended_session

        with _from_journal(folder, ended):
            return folder, SessionAnswer(status_of_ended_session(folder), over=str(ended))


def story_of(name: str, subject: str) -> tuple[SessionFolder, to_client.Story, str]:
    """The story of a subject; and, of a session that is over, that it is. Raises SessionError.

    If no session is named and the chosen one does not know the subject, the other sessions are searched. A live manager
    forgets calls that ended well; its journal remembers them.
    """
    chosen = choosing.session_to_show(name)
    story, over = _story_in(chosen, subject)
    if name or story.found or is_several(story):
        return chosen, story, over
    searched = [chosen]
    for folder in choosing.others_to_search(chosen):
        with contextlib.suppress(SessionError):  # one that cannot be read hides no other
            found, its_over = _story_in(folder, subject)
            if found.found:
                console.note(
                    f"{subject} is not in session {_id(chosen)}; this is session {_id(folder)} ({folder.path})"
                )
                return folder, found, its_over
            searched.append(folder)
    if len(searched) > 1:
        names = ", ".join(map(_id, searched))
        headline = f"{story.headline}; searched sessions {names} (`stoker sessions` lists them, --session names one)"
        story = msgspec.structs.replace(story, headline=headline)
    return chosen, story, over


def is_several(story: to_client.Story) -> bool:
    """True if the subject is the beginning of several names in its session."""
    return not story.found and story.headline.startswith("could be")


def _id(folder: SessionFolder) -> str:
    return folder.read().session


def _story_in(folder: SessionFolder, subject: str) -> tuple[to_client.Story, str]:
    from stoker.manager.live.replay import story_of_ended_session, story_with_journal

    try:
        with Observer(folder) as observer:
            story = observer.story(subject)
    except SessionEndedError as ended:
        with _from_journal(folder, ended):
            return story_of_ended_session(folder, subject), str(ended)
    return story_with_journal(folder, subject, story), ""


def calls_of(name: str, *, limit: int, only: ListedState | None) -> tuple[to_client.Calls, str]:
    """Calls of a session; and, of one that is over, that it is. Raises SessionError."""
    folder = choosing.session_to_show(name)
    try:
        with Observer(folder) as observer:
            return observer.calls(limit=limit, only=only), ""
    except SessionEndedError as ended:
        from stoker.manager.live.replay import calls_of_ended_session

        with _from_journal(folder, ended):
            return calls_of_ended_session(folder, limit=limit, only=only), str(ended)


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
        lines = raised(error)
        if lines:
            text = f"{ended}, and its policy raises where it did then; stoker replay {folder.path} says at which event"
            raise SessionError("\n".join([text, *lines])) from error
        raise SessionError(
            f"{ended}, and its journal {folder.journal} cannot be replayed by this version of Stoker"
            f" ({type(error).__name__}: {error}); its logs are there: stoker logs --session {folder.path}"
        ) from error
