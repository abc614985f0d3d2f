"""Messages from the manager to a client."""

from __future__ import annotations

from stoker.protocol import show_status
from stoker.protocol.blocks import BlockOrder, KnownBlock
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress, FailureGroup, ListedCall, Message
from stoker.protocol.ids import BlockId, CallId
from stoker.protocol.status import SessionFacts, StoryFacts


class ClientWelcome(Message, frozen=True, tag="welcome"):
    """The manager accepts the client. `number`: high bits of the client's call ids. `again`: True if messages of the
    client were lost. The client then resubmits its open calls and sends `Resubmitted`.
    """

    session: str
    number: int
    again: bool = False


class ClientRefused(Message, frozen=True, tag="refused"):
    """The client's hello has another session or protocol version."""

    reason: str


class Results(Message, frozen=True, tag="results", gc=False):
    """The ends of calls. `first`: position of `ends[0]` in the sequence of all ends for this client, from 0."""

    first: int
    ends: list[CallEnd]


class Rejected(Message, frozen=True, tag="rejected"):
    """The manager ignored a message of the client. `calls`: the calls in that message."""

    reason: str
    calls: tuple[CallId, ...] = ()


class ProgressReports(Message, frozen=True, tag="progress"):
    reports: list[CallProgress]


class Pieces(Message, frozen=True, tag="pieces", gc=False):
    """Pieces of a call's result (`to_agent.Yielded`). The client answers with `to_manager.PiecesTaken`."""

    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class Forecasts(Message, frozen=True, tag="forecasts"):
    """Expected ends of calls with deadlines, sent after each change. `said_at`: time on the manager's clock (0:
    unknown)."""

    forecasts: list[CallForecast]
    said_at: float = 0.0


class Ack(Message, frozen=True, tag="ack"):
    """The manager has stored the client's frames up to number `sequence` in its journal."""

    sequence: int


class KnownBlocks(Message, frozen=True, tag="known-blocks"):
    """All blocks that have not ended. A new factory submits a job for each block that has none, and cancels other jobs
    of the session.
    """

    blocks: tuple[KnownBlock, ...]


class SubmitBlocks(Message, frozen=True, tag="submit-blocks"):
    orders: tuple[BlockOrder, ...]


class CancelBlocks(Message, frozen=True, tag="cancel-blocks"):
    """Cancel blocks. The factory answers with BlockUpdate when the blocks have ended."""

    blocks: tuple[BlockId, ...]
    reason: str


class Status(SessionFacts, frozen=True, tag="status"):
    """The state of the session."""

    def __str__(self) -> str:
        return "\n".join(show_status.render(self))


class Story(StoryFacts, frozen=True, tag="story"):
    def __str__(self) -> str:
        return "\n".join(show_status.format_explanation_lines(self))


class Calls(Message, frozen=True, tag="calls"):
    """The calls that have run longest, that run next, and that failed last. `running`, `waiting`, `failed`: total
    numbers in these states. `groups`: all failures by kind.
    """

    session: str
    running: int
    waiting: int
    failed: int
    calls: tuple[ListedCall, ...]
    groups: tuple[FailureGroup, ...] = ()


class SessionOver(Message, frozen=True, tag="over"):
    """The manager is about to exit."""

    reason: str


ToClient = (
    ClientWelcome | ClientRefused | Results | Rejected | ProgressReports | Forecasts | Ack | Status | Story | Calls
    | SessionOver | KnownBlocks | SubmitBlocks | CancelBlocks | Pieces
)  # fmt: skip
