"""The way back from a journal: the same events, in order, at the same times, give the same manager."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.core import report, story
from stoker.manager.core.events import Command, Event
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live.chosen import policies_of
from stoker.manager.live.past import JournalPast
from stoker.manager.live.records import Decided
from stoker.manager.policies import default_policies
from stoker.protocol import to_client
from stoker.protocol.calls import ListedState
from stoker.protocol.ids import parse_call
from stoker.protocol.session import SessionFolder

log = logging.getLogger(__name__)


class Replay:
    """A replay of what a journal has. `core`: as it is after the events that were given so far; None before the first.
    `since`: events before this time are not in the journal any more, because it was compacted; 0 = all are."""

    def __init__(
        self, path: Path, session: str, policies: Policies | None = None, *, watch: frozenset[int] = frozenset()
    ) -> None:
        self._policies = policies or default_policies()
        self._session, self._watch = session, watch
        self._past = JournalPast(path, watch=watch, policies=self._policies)
        self.core = self._past.core
        self.since = self._past.since

    def events(self) -> Iterator[tuple[float, Event]]:
        """Each event, before `core` is given it: the caller hands it to `handle`."""
        for now, record in self._past.records():
            if not isinstance(record, Decided):
                yield now, record

    def handle(self, event: Event, now: float) -> list[Command]:
        """What the core decides about an event."""
        if self.core is None:
            self.core = Core(self._session, self._policies, now=now, watch=self._watch)
            self.core.start()
        return self.core.handle(event, now)


def replay(
    path: Path, session: str, policies: Policies | None = None, *, watch: frozenset[int] = frozenset()
) -> Core | None:
    """The core as it was after the journal's last event, or None if the journal is empty. Its commands were carried out
    long ago and are dropped. `watch`: calls whose story is wanted even though they have ended."""
    again = Replay(path, session, policies, watch=watch)
    for now, event in again.events():
        again.handle(event, now)
    return again.core


def story_of_ended_session(folder: SessionFolder, subject: str) -> to_client.Story:
    """What `stoker explain` says of a session that is over, or of a call that has ended. Raises SessionError."""
    try:
        watch = frozenset({int(parse_call(subject))})
    except ValueError:
        watch = frozenset()
    core, since = _replayed(folder, watch)
    told = story.tell_story(core.state, subject)
    if told.found or not since:
        return told
    compacted = f"what happened before {datetime.fromtimestamp(since):%Y-%m-%d %H:%M:%S} was compacted"
    return msgspec.structs.replace(told, headline=f"{told.headline.partition(';')[0]}; {compacted}")


def story_with_journal(folder: SessionFolder, subject: str, told: to_client.Story) -> to_client.Story:
    """The story that a live manager tells, or that of its journal, which remembers calls that the manager forgot.

    A journal that cannot be read at this moment (it is empty still, or was compacted just now) changes nothing.
    """
    if told.found:
        return told
    try:
        kept = story_of_ended_session(folder, subject)
    except Exception as error:
        log.debug("%s: the journal cannot be read: %r", subject, error)
        return told
    return kept if kept.found or told.headline == story.IN_JOURNAL else told


def status_of_ended_session(folder: SessionFolder) -> to_client.Status:
    """What `stoker status` says of a session that is over. Raises SessionError."""
    return report.session_status(_replayed(folder, frozenset())[0].state)


def calls_of_ended_session(folder: SessionFolder, *, limit: int, only: ListedState | None) -> to_client.Calls:
    """What `stoker calls` says of a session that is over. Raises SessionError."""
    return report.list_calls(_replayed(folder, frozenset())[0].state, limit=limit, only=only)


def _replayed(folder: SessionFolder, watch: frozenset[int]) -> tuple[Core, float]:
    again = Replay(folder.journal, folder.read().session, policies_of(folder), watch=watch)
    for now, event in again.events():
        again.handle(event, now)
    if again.core is None:
        raise SessionError(f"the journal of {folder.path} is empty: nothing has happened in the session")
    return again.core, again.since
