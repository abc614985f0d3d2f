"""What the manager says to a client."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import BARE
from stoker.manager.protocol.blocks import BlockOrder, BlockStatus, KnownBlock
from stoker.manager.protocol.calls import CallEnd, CallForecast, CallProgress
from stoker.manager.protocol.ids import BlockId, CallId
from stoker.manager.protocol.listed import ListedCall


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


class Progress(_Message, frozen=True, tag="progress"):
    """Reports of the client's running calls."""

    reports: list[CallProgress]


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
    """To the factory: cancel the jobs of these blocks. Answered with BlockNews when they are over."""

    blocks: tuple[BlockId, ...]
    reason: str


class LibraryStatus(msgspec.Struct, frozen=True):
    """One library in `stoker status`. `state` is a LibraryState's value; memory is measured, in bytes. Of one that
    loads: since how many seconds, and what it printed last."""

    library: int
    recipe: str
    state: str
    phase: str
    pilot: str
    devices: tuple[str, ...]
    running: int
    served: int
    memory_bytes: int
    device_bytes: int
    loading_s: float = 0.0
    line: str = ""


class DeviceStatus(msgspec.Struct, frozen=True):
    """One device: memory in bytes, in all and promised."""

    device: str
    kind: str
    memory_bytes: int
    promised_bytes: int
    libraries: tuple[int, ...]
    fault: str = ""


class PilotStatus(msgspec.Struct, frozen=True):
    """One pilot. `ends_in_s` is its walltime left, 0 = no limit; `ended` counts the calls that ended there, `rate` is
    those a second over the last half minute."""

    pilot: str
    host: str
    block: str
    state: str
    devices: tuple[DeviceStatus, ...]
    folder: str
    ended: int
    rate: float
    ends_in_s: float
    source: str = ""
    objects: int = 0
    draining: str = ""


class ObjectStatus(msgspec.Struct, frozen=True):
    """How an object of the contexts has travelled: pilots that hold it or are getting it, and bytes read from where it
    comes from and from other pilots."""

    name: str
    size_bytes: int
    holders: int
    fetching: int
    origin_bytes: int
    peer_bytes: int
    trouble: str = ""


class ContextStatus(msgspec.Struct, frozen=True):
    """One context: how many libraries hold it or load it, what it cost, how often it was reused. `last_failure` is why
    it could not be loaded the last time, if it has not been since. `ended` counts every call that ended, however;
    `served` those that its libraries ran to their end, a gang's call once for each library.

    `arguments` are its loader's, in short. `rate`: calls that ended a second, over the last half minute; `left_s`:
    seconds until its open calls are done (as in Status)."""

    key: str
    name: str
    hot: int
    loading: int
    queued: int
    running: int
    loads: int
    ended: int
    load_s: float
    load_total_s: float
    run_s: float
    run_total_s: float
    memory_bytes: int
    waits_for: str
    last_failure: str = ""
    arguments: str = ""
    rate: float = 0.0
    left_s: float = 0.0
    served: int = 0

    @property
    def title(self) -> str:
        """What people call it: `llm-7f3a('models/small')`, and `no context` for that of calls that want none."""
        return f"{self.name}{self.arguments}" if self.key != BARE.key else "no context"


class StoryLine(msgspec.Struct, frozen=True):
    """One thing that happened, at `at` on the wall clock (seconds since the epoch)."""

    at: float
    text: str


JOURNAL = "journal"
"""The name under which `Status.trouble` says that the journal cannot be written."""


class Status(_Message, frozen=True, tag="status"):
    """The whole session at one moment. Rates in calls a second over the last half minute.

    A call that has ended counts once: in `done` (with a result), `failed` or `cancelled`. `left_s`: seconds until all
    open calls are done (0 = none is open, or it is not known), counted from when the first pilot is here;
    `pilot_in_s`: until the batch system expects to start one (0 = one is here, or it does not say).

    `emptied_blocks`: those of the program's own that have brought pilots and have none now.
    `gone_pilots`: those that were here once and have left, `lost_pilots` among them, which `losses` counts by reason.
    `jobs` are blocks that the manager has asked for and that are not over, `ended_blocks` counts the others by how
    they ended; `trouble` says what is wrong with a batch system, or (`peers`) that pilots cannot reach each other, or
    (`journal`) that calls and results wait because the session's journal cannot be written.
    `notices` say what has happened to the session itself.
    """

    session: str
    uptime_s: float
    queued: int
    running: int
    done: int
    failed: int
    rate: float
    left_s: float
    pilots: tuple[PilotStatus, ...]
    libraries: tuple[LibraryStatus, ...]
    contexts: tuple[ContextStatus, ...]
    blocks: dict[str, str]
    lost_pilots: int
    rerun_calls: int
    refused: dict[str, int]
    cancelled: int = 0
    gone_pilots: int = 0
    jobs: tuple[BlockStatus, ...] = ()
    trouble: dict[str, str] = msgspec.field(default_factory=dict)
    objects: tuple[ObjectStatus, ...] = ()
    ended_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    notices: tuple[StoryLine, ...] = ()
    losses: dict[str, int] = msgspec.field(default_factory=dict)
    pilot_in_s: float = 0.0
    emptied_blocks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As `stoker status` shows it."""
        from stoker.manager.protocol.show_status import render

        return "\n".join(render(self))


class Story(_Message, frozen=True, tag="story"):
    """Why a call, pilot, library or context is where it is. `found` is False for an unknown subject.

    Of a call: `payload` are its pickled arguments, where they are few, and `arguments` what the asker reads in them.
    `waits_for`: why it has not begun to run, in words, while that is so; `runs_in`: the libraries that have it now."""

    subject: str
    found: bool
    headline: str
    lines: tuple[StoryLine, ...]
    payload: bytes = b""
    arguments: str = ""
    waits_for: str = ""
    runs_in: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As `stoker explain` shows it."""
        from stoker.manager.protocol.show_story import render

        return "\n".join(render(self))


class Calls(_Message, frozen=True, tag="calls"):
    """Some of the session's calls: those that have run longest, those that are next, those that failed last. The
    numbers count all that there are of each state."""

    session: str
    running: int
    waiting: int
    failed: int
    calls: tuple[ListedCall, ...]


class SessionOver(_Message, frozen=True, tag="over"):
    """The manager is about to exit."""

    reason: str


ToClient = (
    ClientWelcome | ClientRefused | Results | Rejected | Progress | Forecasts | Ack | Status | Story | Calls
    | SessionOver | KnownBlocks | SubmitBlocks | CancelBlocks
)  # fmt: skip
