"""What the manager says to a client."""

from __future__ import annotations

import msgspec

from stoker.protocol import show_status
from stoker.protocol.blocks import BlockOrder, KnownBlock
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress, FailureGroup, ListedCall
from stoker.protocol.ids import BlockId, CallId
from stoker.protocol.status import SessionFacts, StoryFacts


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class ClientWelcome(_Message, frozen=True, tag="welcome"):
    """The manager knows the client. `number` is the high part of its calls' ids. `again`: the manager has lost a part
    of what the client had told it. The client says again what it still waits for, then `Resubmitted`."""

    session: str
    number: int
    again: bool = False


class ClientRefused(_Message, frozen=True, tag="refused"):
    """The manager does not want the client: wrong session or protocol."""

    reason: str


class Results(_Message, frozen=True, tag="results", gc=False):
    """Ends of calls. `first` numbers the first of them among all that this client was ever sent, from 0."""

    first: int
    ends: list[CallEnd]


class Rejected(_Message, frozen=True, tag="rejected"):
    """A message of the client's was not accepted and changed nothing; `calls` are those it would have made."""

    reason: str
    calls: tuple[CallId, ...] = ()


class ProgressReports(_Message, frozen=True, tag="progress"):
    """Reports of the client's running calls."""

    reports: list[CallProgress]


class Pieces(_Message, frozen=True, tag="pieces", gc=False):
    """Pieces that a running call has yielded: pickled, numbered from 0 within one `run` of the call. `first`: the
    number of the first of them. `waits`: the call waits until all are acknowledged (`to_manager.PiecesTaken`)."""

    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class Forecasts(_Message, frozen=True, tag="forecasts"):
    """When calls with deadlines are expected to end. Said of a call at first, and whenever it has changed. `said_at` is
    the time on the manager's clock when it says so; 0 = unknown."""

    forecasts: list[CallForecast]
    said_at: float = 0.0


class Ack(_Message, frozen=True, tag="ack"):
    """Frames up to this number are in the manager's journal."""

    sequence: int


class KnownBlocks(_Message, frozen=True, tag="known-blocks"):
    """To a factory that has just come: every block that is not over. It looks after their jobs from now on, submits
    those that were asked for and not submitted, and cancels jobs of the session that are not among them."""

    blocks: tuple[KnownBlock, ...]


class SubmitBlocks(_Message, frozen=True, tag="submit-blocks"):
    """To the factory: submit these."""

    orders: tuple[BlockOrder, ...]


class CancelBlocks(_Message, frozen=True, tag="cancel-blocks"):
    """To the factory: cancel the jobs of these blocks. Answered with BlockUpdate when they are over."""

    blocks: tuple[BlockId, ...]
    reason: str


class Status(SessionFacts, frozen=True, tag="status"):
    """The whole session at one moment."""

    def __str__(self) -> str:
        """As `stoker status` shows it."""
        return "\n".join(show_status.render(self))


class Story(StoryFacts, frozen=True, tag="story"):
    """Why a call, pilot, library or context is where it is."""

    def __str__(self) -> str:
        """As `stoker explain` shows it."""
        return "\n".join(show_status.story_lines(self))


class Calls(_Message, frozen=True, tag="calls"):
    """Some of the session's calls: those that have run longest, those that are next, those that failed last. The
    numbers count all that there are of each state. `groups`: all that failed, by function, exception and line."""

    session: str
    running: int
    waiting: int
    failed: int
    calls: tuple[ListedCall, ...]
    groups: tuple[FailureGroup, ...] = ()


class SessionOver(_Message, frozen=True, tag="over"):
    """The manager is about to exit."""

    reason: str


ToClient = (
    ClientWelcome | ClientRefused | Results | Rejected | ProgressReports | Forecasts | Ack | Status | Story | Calls
    | SessionOver | KnownBlocks | SubmitBlocks | CancelBlocks | Pieces
)  # fmt: skip
