"""Messages of the manager to a client."""

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
    """`number`: the high part of its calls' ids. `again`: the manager lost some of the client's messages. The client
    repeats what it still waits for, then sends `Resubmitted`."""

    session: str
    number: int
    again: bool = False


class ClientRefused(_Message, frozen=True, tag="refused"):
    """Wrong session or protocol."""

    reason: str


class Results(_Message, frozen=True, tag="results", gc=False):
    """`first`: the number of the first one among all that this client was sent, from 0."""

    first: int
    ends: list[CallEnd]


class Rejected(_Message, frozen=True, tag="rejected"):
    """A client's message changed nothing. `calls`: the calls in it."""

    reason: str
    calls: tuple[CallId, ...] = ()


class ProgressReports(_Message, frozen=True, tag="progress"):
    reports: list[CallProgress]


class Pieces(_Message, frozen=True, tag="pieces", gc=False):
    """Pieces of a running call: pickled, numbered from 0 within one `run`. `waits`: the call waits until all are
    acknowledged (`to_manager.PiecesTaken`)."""

    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class Forecasts(_Message, frozen=True, tag="forecasts"):
    """Expected ends of calls with deadlines, sent first and after each change. `said_at`: the manager's clock; 0 =
    unknown."""

    forecasts: list[CallForecast]
    said_at: float = 0.0


class Ack(_Message, frozen=True, tag="ack"):
    """Frames up to this number are in the manager's journal."""

    sequence: int


class KnownBlocks(_Message, frozen=True, tag="known-blocks"):
    """To a new factory: every block that is not over. It manages their jobs, submits the others, and cancels other jobs
    of the session."""

    blocks: tuple[KnownBlock, ...]


class SubmitBlocks(_Message, frozen=True, tag="submit-blocks"):
    orders: tuple[BlockOrder, ...]


class CancelBlocks(_Message, frozen=True, tag="cancel-blocks"):
    """A BlockUpdate answers when they are over."""

    blocks: tuple[BlockId, ...]
    reason: str


class Status(SessionFacts, frozen=True, tag="status"):
    """The whole session at one moment."""

    def __str__(self) -> str:
        return "\n".join(show_status.render(self))


class Story(StoryFacts, frozen=True, tag="story"):
    def __str__(self) -> str:
        return "\n".join(show_status.story_lines(self))


class Calls(_Message, frozen=True, tag="calls"):
    """The longest running, the next to run, the last failed calls; the numbers count all of each state. `groups`: all
    failed calls by function, exception and line."""

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
