"""Everything that the manager knows, in one object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from stoker.manager.core.client import Client
from stoker.manager.core.cost import Cost
from stoker.manager.core.nouns import Call, Context, CountedFailures, Device, Group, Library, Pilot
from stoker.manager.core.phases import PilotState
from stoker.manager.core.sources import Block, SourceState
from stoker.manager.core.transfers import Transfers
from stoker.manager.core.trials import Trial
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress
from stoker.protocol.ids import BlockId, ClientId, FunctionKey, LibraryId, PilotId
from stoker.protocol.pace import Counts
from stoker.protocol.to_pilot import FunctionBlob

JOURNAL_LOST = "the journal had lost a part: clients, pilots and the factory have said anew what they hold"
"""A notice of the session."""

KEPT_REFUSALS = 200
"""What is refused is counted by so many kinds; others count together."""
KEPT_NOTICES = 20
"""The last so many notices of a session are kept."""


class State:
    """Everything. `now` is the time of the event being handled; `View` in `seams` is how policies see it."""

    def __init__(self, session: str, *, now: float = 0.0) -> None:
        self.session = session
        self.started_at = now
        self.now = now
        self.lease_s = 60.0
        """How long pilots wait for a manager that is gone. Decisions rest on it, so it is told by an event."""
        self.clients: dict[ClientId, Client] = {}
        self.clients_by_number: dict[int, Client] = {}
        self.next_client = 0
        self.departed: dict[int, None] = {}
        """Numbers of clients that were gone for so long that the rest of them is forgotten."""
        self.functions: dict[FunctionKey, FunctionBlob] = {}
        self.unused_functions: dict[FunctionKey, None] = {}
        """Those that their clients will not name again, as long as open calls need them."""
        self.groups: dict[object, Group] = {}
        self.costs: dict[tuple[str, str], Cost] = {}
        """By function and recipe key."""
        self.unrecorded: dict[Cost, None] = {}
        """Those with runs that are not in the performance history yet."""
        self.recorded_at = 0.0
        """When costs of runs were recorded last."""
        self.contexts: dict[str, Context] = {}
        self.calls: dict[int, Call] = {}
        self.orphans: dict[int, Orphan] = {}
        """Calls that run and that no client has submitted, as far as the journal knows."""
        self.streams: dict[int, StreamFacts] = {}
        """Running calls that have yielded pieces."""
        self.failed_at: deque[float] = deque(maxlen=100)
        """When events made the core raise."""
        self.banned: dict[str, str] = {}
        """Peers on whose events the core has failed, and what they are told."""
        self.forgotten: dict[int, None] = {}
        """Calls that ended before the journal lost that: their clients may still read the files of their results."""
        self.kept_ends: dict[int, CallEnd] = {}
        """Ends from before the journal began anew, of calls that their clients may submit again (see `holes`)."""
        self.failed: dict[int, Call] = {}
        """The last calls that ended without a result, for their stories."""
        self.pilots: dict[PilotId, Pilot] = {}
        self.gone_pilots: dict[PilotId, Pilot] = {}
        """The last pilots that ended or were lost: for their stories, and to tell them if they come back."""
        self.libraries: dict[LibraryId, Library] = {}
        self.gone_libraries: dict[LibraryId, Library] = {}
        """The last libraries that are gone, for their stories."""
        self.transfers = Transfers()
        """Objects, and who gets them from whom."""
        self.hungry: dict[str, Context] = {}
        """Contexts with waiting calls."""
        self.reports: dict[int, CallProgress] = {}
        """Last progress report of each running call that made one."""
        self.printed: dict[int, CallProgress] = {}
        """How far running calls are that print it and do not say it."""
        self.forecasts: dict[int, CallForecast] = {}
        """When calls are expected to end, as their clients were told last."""
        self.trials: dict[int, Trial] = {}
        """What calls have lost that they ran on, by call."""
        self.reserved: dict[PilotId, Pilot] = {}
        """The pilots that are kept for a call that is to run alone."""
        self.breaks: dict[int, int] = {}
        """How often the ranks of a gang call have lost each other."""
        self.broken_runs: dict[int, float] = {}
        """When the last run of a gang call was sent that ended because its ranks had lost each other: until a library
        is known to have died in it."""
        self.timers: dict[str, float] = {}
        self.sources: dict[str, SourceState] = {}
        self.blocks: dict[BlockId, Block] = {}
        """Those that the manager has asked for and that are not over."""
        self.past_blocks: dict[BlockId, Block] = {}
        """The last ones that are over, for their stories."""
        self.ended_blocks: dict[str, int] = {}
        """How many are over, by how they ended."""
        self.next_block = 1
        self.factory_trouble = ""
        """Why nobody submits blocks just now; empty while somebody does."""
        self.said_blocks: dict[str, str] = {}
        """What a client says of blocks that are its own business."""
        self.most_pilots: dict[ClientId, int] = {}
        """How many pilots the blocks of each such client bring at once at most; 0 = any number."""
        self.notices: dict[str, float] = {}
        """What the people of the session should know of it, and when it happened last. The oldest comes first."""
        self.refused: dict[str, int] = {}
        """What was refused or ignored, by kind, counted."""
        self.tier_seconds: dict[str, float] = {"cold": 0.0, "warm": 0.0}
        self.next_library = 1
        self.done = 0
        self.failures = 0
        self.failure_groups: dict[tuple[str, str, str], CountedFailures] = {}
        """How often what has failed, by function, exception and line (see `failure_groups`)."""
        self.cancelled = 0
        self.losses: dict[LossReason, int] = {}
        """Pilots that were lost, by reason."""
        self.pilots_gone = 0
        """However they went."""
        self.rerun_calls = 0
        self.rate: Counts = deque()
        """Calls that ended in each of the last seconds."""
        self.ending = ""
        """Why the session ends, once it does."""
        self.kept = False
        """Whether the session goes on when its clients have left."""

    @property
    def lost_pilots(self) -> int:
        """Pilots that were lost, for whatever reason."""
        return sum(self.losses.values())

    @property
    def ends_per_s(self) -> int:
        """Calls that ended in the last whole second."""
        before = int(self.now) - 1
        for second, count in reversed(self.rate):
            if second <= before:
                return count if second == before else 0
        return 0

    def devices(self) -> Iterator[Device]:
        """Devices of pilots that can be given work."""
        for pilot in self.pilots.values():
            if pilot.state is PilotState.HERE and pilot.reserved is None:
                for device in pilot.devices.values():  # a generator of its own for each pilot would cost more
                    if not device.fault:
                        yield device

    def block_of(self, pilot: Pilot) -> Block | None:
        """The block of a pilot, if the manager asked for it."""
        id = BlockId(pilot.block)
        return self.blocks.get(id) or self.past_blocks.get(id)

    def notice(self, text: str) -> None:
        """Keep a sentence for `stoker status`. The same sentence is kept once, with the time of the last time."""
        self.notices.pop(text, None)
        self.notices[text] = self.now
        if len(self.notices) > KEPT_NOTICES:
            del self.notices[next(iter(self.notices))]

    def refuse(self, what: str, count: int = 1) -> None:
        """Count something that was refused or ignored."""
        if len(self.refused) >= KEPT_REFUSALS and what not in self.refused:
            what = "of yet another kind"
        self.refused[what] = self.refused.get(what, 0) + count


class StreamFacts:
    """What is told of a running call's pieces (see `pieces`). It is in no journal, and nothing is decided by it."""

    __slots__ = ("run", "sent", "taken", "waits_since")

    def __init__(self, run: int) -> None:
        self.run = run
        self.sent = 0
        """Pieces that its library has sent."""
        self.taken = 0
        """Pieces that its client has acknowledged."""
        self.waits_since: float | None = None
        """Since when the call waits for its reader; None = it does not."""


class Orphan:
    """A call that a library runs and that the manager has never heard of (see `repair`)."""

    __slots__ = ("end", "library")

    def __init__(self, library: Library) -> None:
        self.library = library
        self.end: CallEnd | None = None
        """How it ended, if it has ended before its client submitted it again."""
