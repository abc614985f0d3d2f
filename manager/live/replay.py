"""Replay a journal: the same events in the same order at the same times lead to the same state of the manager.

`verify_replay` compares its decisions with the checksums in the journal, and stops at a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from stoker.errors import SessionError
from stoker.manager.core import report, story
from stoker.manager.core.events import (
    Command,
    Event,
    FromClient,
    FromPilot,
    ManagerRestarted,
    RecordsLost,
    ToClient,
    ToPilot,
)
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live.decisions import decision_checksum
from stoker.manager.live.restore import EventFailedError, JournalReplay
from stoker.manager.live.session_policies import create_policies_of_session
from stoker.protocol import to_client
from stoker.protocol.calls import ListedState
from stoker.protocol.ids import parse_call_id
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_manager import ClientHello, PilotHello
from stoker.tracebacks import user_traceback_lines

log = logging.getLogger(__name__)

_SHOWN = 12
_LONGEST = 200


def story_of_ended_session(folder: SessionFolder, subject: str) -> to_client.Story:
    """Return the history of a call or another part of an ended session. Raises SessionError."""
    try:
        watch = frozenset({int(parse_call_id(subject))})
    except ValueError:
        watch = frozenset()
    core, since = _replay_session(folder, watch)
    told = story.tell_story(core.state, subject)
    if told.found or not since:
        return told
    compacted = f"the journal was compacted: events before {datetime.fromtimestamp(since):%Y-%m-%d %H:%M:%S} are gone"
    return msgspec.structs.replace(told, headline=f"{told.headline.partition(';')[0]}; {compacted}")


def complete_story_from_journal(folder: SessionFolder, subject: str, told: to_client.Story) -> to_client.Story:
    """Return the manager's answer (`told`), or the journal's history of a call that the manager has forgotten."""
    if told.found:
        return told
    try:
        kept = story_of_ended_session(folder, subject)
    except Exception as error:
        log.debug("%s: the journal cannot be read: %r", subject, error)
        return told
    return kept if kept.found or told.headline == story.ENDED_CALL_ANSWER else told


def status_of_ended_session(folder: SessionFolder) -> to_client.Status:
    return report.build_session_status(_replay_session(folder)[0].state)


def calls_of_ended_session(folder: SessionFolder, *, limit: int, only: ListedState | None) -> to_client.Calls:
    return report.list_calls(_replay_session(folder)[0].state, limit=limit, only=only)


def _replay_session(folder: SessionFolder, watch: frozenset[int] = frozenset()) -> tuple[Core, float]:
    past = JournalReplay(folder.journal, folder.read().session, create_policies_of_session(folder), watch=watch)
    for now, event in past.read_events():
        past.handle(event, now)
    if past.core is None:
        raise SessionError(f"the journal of {folder.path} is empty: nothing has happened in the session")
    return past.core, past.since


# ---- verifying


class FirstDifference(msgspec.Struct, frozen=True):
    """The first event for which a replay decided differently."""

    event: int
    after_s: float
    happened: tuple[str, ...]
    decides: tuple[str, ...]


class ReplayResult(msgspec.Struct, frozen=True):
    """`checked`: number of confirmed decisions. `since`: time before which events are not in the journal (0 = none).
    `lost`: number of damaged parts."""

    session: str
    events: int
    checked: int
    restarts: int
    lasted_s: float
    difference: FirstDifference | None = None
    since: float = 0.0
    lost: int = 0

    @property
    def lacks_checksums(self) -> bool:
        return self.events > 0 and not self.checked


def verify_replay(
    path: Path, *, session: str, policies: Policies, tell: Callable[[int, float], None] | None = None
) -> ReplayResult:
    """Replay a journal and compare its decisions. `tell` receives the number of events and the elapsed seconds. Raises
    SessionError if the journal is missing or empty, or if a policy raises an exception.
    """
    past = JournalReplay(path, session, policies)
    events = restarts = lost = 0
    began = last = past.since
    try:
        for each in past.replay_and_compare():
            if past.difference is not None:
                break
            events, began, last = events + 1, began or each.now, each.now
            restarts += isinstance(each.event, ManagerRestarted)
            lost += isinstance(each.event, RecordsLost)
            if tell is not None and not events % 10_000:
                tell(events, last - began)
    except EventFailedError as error:
        cause = error.__cause__
        lines = user_traceback_lines(cause) if cause is not None else []
        if not lines:  # an error in the core, not in a policy
            raise
        where = f"session {session}: event {error.number:,}, {error.now - (began or error.now):.3f} s after the start"
        text = f"{where}: the policy raises {type(cause).__name__}"
        raise SessionError("\n".join([text, *lines]), session=session, event=error.number) from cause
    if past.core is None:
        raise SessionError(f"the journal {path} is empty: nothing has happened in the session")
    found = None
    if (mine := past.difference) is not None:
        decides = _shorten_lines([_describe_command(each) for each in mine.commands if decision_checksum([each])]) or (
            "nothing",
        )
        found = FirstDifference(mine.number, mine.now - began, _shorten_lines(_describe_event(mine.event)), decides)
    return ReplayResult(session, events, past.checked, restarts, last - began, found, past.since, lost)


def find_journal_and_session(path: Path) -> tuple[Path, str]:
    """Return the journal and the session id at the path of a journal or session. Raises SessionError."""
    if path.is_dir():
        folder = SessionFolder(path)
        return folder.journal, folder.read().session
    past = JournalReplay(path)
    if past.core is not None:
        return path, past.core.state.session
    for _, event in past.read_journal():
        if isinstance(event, FromClient | FromPilot) and event.messages:
            hello = event.messages[0]
            if isinstance(hello, ClientHello | PilotHello):
                return path, hello.session
    raise SessionError(f"the journal {path} does not name its session: no program or pilot has connected in it")


def _describe_command(command: Command) -> str:
    match command:
        case ToPilot(whom, said) | ToClient(whom, said):
            return f"{whom}: {said}"
        case _:
            return str(command)


def _describe_event(event: Event) -> list[str]:
    match event:
        case FromClient(whom, _, messages) | FromPilot(whom, _, messages):
            return [f"{whom} said {message}" for message in messages]
        case _:
            return [str(event)]


def _shorten_lines(lines: Sequence[str]) -> tuple[str, ...]:
    shown = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …" for line in lines[:_SHOWN]]
    return (*shown, *([f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []))
