"""The way back from a journal: the same events, in order, at the same times, give the same manager."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import SessionError
from stoker.manager.core import call_list, report, story
from stoker.manager.core.core import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live import journal
from stoker.manager.live.chosen import policies_of
from stoker.manager.policies import default_policies
from stoker.manager.protocol import to_client
from stoker.manager.protocol.ids import parse_call
from stoker.manager.protocol.listed import ListedState
from stoker.manager.protocol.session import SessionFolder


def replay(
    path: Path, session: str, policies: Policies | None = None, *, watch: frozenset[int] = frozenset()
) -> Core | None:
    """The core as it was after the journal's last event, or None if the journal is empty. Its commands were carried out
    long ago and are dropped. `watch`: calls whose story is wanted even though they have ended."""
    core: Core | None = None
    for now, event in journal.read(path):
        if core is None:
            core = Core(session, policies or default_policies(), now=now, watch=watch)
            core.start()
        core.handle(event, now)
    return core


def story_of_ended_session(folder: SessionFolder, subject: str) -> to_client.Story:
    """What `stoker explain` says of a session that is over, or of a call that has ended. Raises SessionError."""
    try:
        watch = frozenset({int(parse_call(subject))})
    except ValueError:
        watch = frozenset()
    return story.tell(_replayed(folder, watch).state, subject)


def status_of_ended_session(folder: SessionFolder) -> to_client.Status:
    """What `stoker status` says of a session that is over. Raises SessionError."""
    return report.status(_replayed(folder, frozenset()).state)


def calls_of_ended_session(folder: SessionFolder, *, limit: int, only: ListedState | None) -> to_client.Calls:
    """What `stoker calls` says of a session that is over. Raises SessionError."""
    return call_list.list_calls(_replayed(folder, frozenset()).state, limit=limit, only=only)


def _replayed(folder: SessionFolder, watch: frozenset[int]) -> Core:
    core = replay(folder.journal, folder.read().session, policies_of(folder), watch=watch)
    if core is None:
        raise SessionError(f"the journal of {folder.path} is empty: nothing has happened in the session")
    return core
