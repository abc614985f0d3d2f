"""Whether a journal replays: the core is given the same events, and each decision is held against the one that was made
while the session lived.

The core is a pure function of its events, so a difference means that something else went into a decision (a fault of
the core or of a policy: a clock, chance, the order of a set), or that the code or the policies are not those that ran
the session. After the first difference the two sessions are no longer the same one, so the replay stops there.

A policy that raises ends a replay as it ended the manager: the journal has the event, and no check of what was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from stoker.errors import SessionError
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
from stoker.manager.live.decisions import NO_DECISIONS, check_of
from stoker.manager.live.journal import MOST_CHECKS
from stoker.manager.live.past import JournalPast
from stoker.manager.live.raised import raised
from stoker.manager.live.records import Decided
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_manager import ClientHello, PilotHello

_SHOWN = 12
"""So many commands of an event are shown, and messages of its frame."""
_LONGEST = 200


class FirstDifference(msgspec.Struct, frozen=True):
    """The first event that was decided otherwise: its number from 0, seconds after the journal's first, what happened,
    and what is decided now (what was decided then is known by its check alone)."""

    event: int
    after_s: float
    happened: tuple[str, ...]
    decides: tuple[str, ...]


class Replayed(msgspec.Struct, frozen=True):
    """What came of a replay. `checked`: events whose decisions the journal knows; `restarts`: managers that ended,
    and came back; `lasted_s`: from the first event to the last one that was replayed; `since`: events before this time
    are not in the journal any more, because it was compacted (0: all are); `lost`: parts of it that are damaged."""

    session: str
    events: int
    checked: int
    restarts: int
    lasted_s: float
    difference: FirstDifference | None = None
    since: float = 0.0
    lost: int = 0

    @property
    def is_old(self) -> bool:
        """Whether the journal knows of no decisions at all: it was written before they were."""
        return self.events > 0 and not self.checked


class _Made(msgspec.Struct, frozen=True):
    """An event that was replayed and whose check has not been met yet."""

    check: int
    now: float
    event: Event
    commands: Sequence[Command]


def verify(
    path: Path, *, session: str, policies: Policies, tell: Callable[[int, float], None] | None = None
) -> Replayed:
    """Replay a journal and compare. `tell` hears now and then how many events have been replayed, and their time in
    seconds after the first. Raises SessionError if there is no journal, or nothing in it, or where a policy raises."""
    past = JournalPast(path, policies=policies)
    core = past.core
    made: dict[int, _Made] = {}
    events = checked = restarts = lost = 0
    began = last = past.since
    found: FirstDifference | None = None
    records = past.records()
    for now, record in records:
        if isinstance(record, Decided):
            if past.is_comparable:
                found, here = _compare(record, made, began)
                checked += here
            made.clear()
            if found is not None:
                break
            continue
        number, began = past.events - 1, began or now
        try:
            if core is None:
                core = Core(session, policies, now=now)
                core.start()
            commands = core.handle(record, now)
        except Exception as error:
            lines = raised(error)
            if not lines:  # nobody's policy, but a fault of the core's
                raise
            where = f"session {session}: event {number:,}, {now - began:.3f} s after the start"
            then = "as it did not" if _was_decided(number, records) else "as it did"
            text = f"{where}: the policy raises {type(error).__name__}, {then} when the session lived"
            raise SessionError("\n".join([text, *lines]), session=session, event=number) from error
        lost += isinstance(record, RecordsLost)
        if isinstance(record, ManagerRestarted):
            made.clear()
        if len(made) < MOST_CHECKS:
            made[number] = _Made(check_of(commands), now, record, commands)
        restarts += isinstance(record, ManagerRestarted)
        events, last = events + 1, now
        if tell is not None and not events % 10_000:
            tell(events, now - began)
    if core is None:
        raise SessionError(f"the journal {path} is empty: nothing has happened in the session")
    return Replayed(session, events, checked, restarts, last - began, found, past.since, lost)


def _was_decided(event: int, records: Iterator[tuple[float, Event | Decided]]) -> bool:
    """Whether the rest of a journal has a check of what was decided about an event."""
    checks = (record for _, record in records if isinstance(record, Decided))
    return any(number == event for record in checks for number, _ in record.numbered())


def _compare(record: Decided, made: dict[int, _Made], began: float) -> tuple[FirstDifference | None, int]:
    """The first difference, if there is one; and how many decisions are the same before it."""
    same = 0
    for number, check in record.numbered():
        mine = made.get(number)
        if mine is None:
            continue
        if mine.check != check:
            decides = [_command(each) for each in mine.commands if _decides(each)]
            return FirstDifference(
                number, mine.now - began, _shortened(_event(mine.event)), _shortened(decides) or ("nothing",)
            ), same
        same += 1
    return None, same


def session_in(path: Path) -> tuple[Path, str]:
    """The journal that is meant, by its own path or its session's folder, and the session that it is of.

    Raises SessionError."""
    if path.is_dir():
        folder = SessionFolder(path)
        return folder.journal, folder.read().session
    past = JournalPast(path)
    if past.core is not None:
        return path, past.core.state.session
    for _, event in past.records():
        if isinstance(event, FromClient | FromPilot) and event.messages:
            hello = event.messages[0]
            if isinstance(hello, ClientHello | PilotHello):
                return path, hello.session
    raise SessionError(
        f"the journal {path} does not say which session it is of: no program or pilot has said hello in it"
    )


# ---- in words


def _decides(command: Command) -> bool:
    said = command.message if isinstance(command, ToPilot | ToClient) else command
    return type(said) not in NO_DECISIONS


def _command(command: Command) -> str:
    match command:
        case ToPilot(pilot=whom, message=said) | ToClient(client=whom, message=said):
            return f"{whom}: {said}"
        case _:
            return str(command)


def _event(event: Event) -> list[str]:
    if isinstance(event, FromClient):
        return [f"{event.client} said {message}" for message in event.messages]
    if isinstance(event, FromPilot):
        return [f"{event.pilot} said {message}" for message in event.messages]
    return [str(event)]


def _shortened(lines: Sequence[str]) -> tuple[str, ...]:
    shown = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …" for line in lines[:_SHOWN]]
    return (*shown, *([f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []))
