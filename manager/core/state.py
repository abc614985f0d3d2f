"""Everything that the manager knows: sources and blocks, evidence of losses, the session.

Where pilots come from: the sources that site files name, and the blocks that were asked of them.

What calls have lost while they ran: the evidence that `retries` judges by.

Everything that the manager knows, in one object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from stoker.manager.core.nouns import Call, Client, Context, CountedFailures, Device, Group, Library, Pilot, PilotState
from stoker.manager.core.per_context import Cost
from stoker.manager.core.transfers import Transfers
from stoker.protocol.blocks import BlockPhase, LossReason, Source
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress, Failure, Printed
from stoker.protocol.ids import BlockId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.protocol.pace import Counts
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import FunctionBlob

# The last so many notes of a block are kept, and its first.
KEPT_BLOCK_NOTES = 50


class SourceState:
    """A source of pilots, and how it has done lately."""

    __slots__ = (
        "abandoned", "blocks", "coming", "devices", "failed_at", "failures", "filling", "held_for", "hold",
        "last_failure", "short_lived", "source", "staying", "stopped", "trouble", "useless",
    )  # fmt: skip

    def __init__(self, source: Source) -> None:
        self.source = source
        self.blocks: dict[BlockId, Block] = {}  # Those that are not over
        self.abandoned: dict[BlockId, None] = {}  # Of these, blocks that are cancelled because their pilots were lost
        self.staying: dict[BlockId, None] = {}  # Blocks that were not let go
        self.coming: dict[BlockId, None] = {}  # Of these in turn, those from which pilots may still come
        self.filling: dict[BlockId, None] = {}  # Of those that stay, blocks that have brought some of their pilots
        self.devices: tuple[DeviceFacts, ...] = ()  # What the last pilot had that came from here
        self.failures = 0  # Blocks that were refused or brought no pilot, since one did
        self.short_lived = 0  # Blocks in a row whose pilots died young and loaded nothing
        self.failed_at = 0.0
        self.last_failure = ""
        self.useless = False  # True if the last failure was a block whose pilots had no usable device
        self.held_for = ""  # What its last block was held for by the batch system; empty once a block ended otherwise
        self.hold = ""  # That hold in the batch system's words, and what to do about it
        self.stopped = ""  # Why no block is asked of it any more, and what to do; empty while it goes on
        self.trouble = ""  # What is wrong with its batch system just now, in that one's words

    @property
    def room(self) -> int:
        """How many more blocks it may have. Abandoned ones leave their room to others, up to as many again."""
        most = self.source.most
        return min(most - (len(self.blocks) - len(self.abandoned)), 2 * most - len(self.blocks))


class Block:
    """A batch job that brings pilots, or is to."""

    __slots__ = (
        "abandoned", "brought", "brought_at", "emptied_at", "expected_at", "held_for", "holds", "id", "job", "leaving",
        "loss", "notes", "phase", "pilots", "proved", "reason", "since", "source", "unsettled",
    )  # fmt: skip

    def __init__(self, id: BlockId, source: SourceState, now: float) -> None:
        self.id = id
        self.source = source
        self.phase = BlockPhase.ASKED
        self.since = now
        self.job = ""
        self.reason = ""
        self.expected_at = 0.0
        self.emptied_at: float | None = None  # When its last pilot left although its job runs
        self.held_for = ""  # What its job was last held for by the batch system; empty if it was not
        self.holds = 0  # How often the batch system has held its job
        self.abandoned = False  # Whether it was let go because of that
        self.loss: LossReason | None = None  # Why its job has ended, as the batch system says
        self.unsettled: dict[PilotId, Pilot] = {}  # Lost pilots without a reason from the batch system yet
        self.leaving = ""  # Why it was let go; empty while it was not
        self.pilots: dict[PilotId, None] = {}  # Those that are here (or cut off)
        self.brought = 0  # Pilots that ever came from it
        self.brought_at = 0.0  # When the first of them came
        self.proved = False  # Whether something was loaded on one of them
        self.notes: list[tuple[float, str]] = [(now, f"asked of source {source.source.name}")]

    def note(self, now: float, text: str) -> None:
        """Remember something for the block's story."""
        self.notes.append((now, text))
        del self.notes[1:-KEPT_BLOCK_NOTES]

    def found(self, now: float) -> None:
        """It was not asked for, as far as the manager knows: its story begins when it was found."""
        self.notes[:1] = [(now, f"found in the batch system of source {self.source.source.name}")]

    @property
    def staying(self) -> bool:
        """Whether it was not let go."""
        return not self.leaving

    @property
    def coming(self) -> bool:
        """Whether pilots may still come from it."""
        return not self.leaving and not self.pilots and self.emptied_at is None

    @property
    def filling(self) -> bool:
        """Whether it runs and has brought some of its pilots, not all."""
        return not self.coming and not self.leaving and 0 < self.brought < self.source.source.nodes


# ---- trials
class Loss:
    """A pilot or library that was lost while a call may have run there (see `retries`)."""

    __slots__ = ("alone", "at", "failure", "library", "memory_bytes", "pilot", "printed", "ran_s")

    def __init__(
        self,
        at: float,
        pilot: Pilot,
        library: LibraryId,
        ran_s: float,
        alone: bool,
        failure: Failure | None,
        memory_bytes: int,
        printed: Printed | None,
    ) -> None:
        self.at = at
        self.pilot = pilot
        self.library = library
        self.ran_s = ran_s
        self.alone = alone  # Whether nothing else can have been the cause: nothing else ran on the pilot
        self.failure = failure  # How the library died, where its pilot lives
        self.memory_bytes = memory_bytes  # Largest measured use while the call ran; 0 = unknown
        self.printed = printed  # The call's output, as far as it is known where that begins

    @property
    def counts(self) -> bool:
        """True unless the pilot is back, or went for another reason."""
        return self.failure is not None or (self.pilot.loss is not None and not self.pilot.loss.explained)

    @property
    def is_settled(self) -> bool:
        """True if no better reason can come any more."""
        return self.failure is not None or self.pilot.loss_settled


class Cut:
    """A call that ran when the walltime of its pilot was over."""

    __slots__ = ("library", "log", "pilot", "ran_s", "walltime_s", "whole")

    def __init__(
        self,
        ran_s: float,
        walltime_s: float,
        whole: bool,
        pilot: PilotId,
        library: LibraryId,
        log: str,
    ) -> None:
        self.ran_s = ran_s
        self.walltime_s = walltime_s
        self.whole = whole  # Whether no pilot could have given it much more time
        self.pilot = pilot
        self.library = library
        self.log = log


class Fault(msgspec.Struct, frozen=True):
    """That a pilot's infrastructure failed a call (see `retries`). `devices`: which devices did; empty: the node did.
    `avoided_until`: the call is not sent there before; `pauses_until`: nor anywhere."""

    at: float
    pilot: PilotId
    devices: frozenset[DeviceId]
    avoided_until: float
    pauses_until: float
    failure: Failure


class Trial:
    """What a call has lost that is not done yet (see `retries`)."""

    __slots__ = ("cuts", "faults", "losses", "pilot", "saved")

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.cuts: list[Cut] = []
        self.faults: list[Fault] = []
        self.saved = b""  # What it had saved of its progress when the last of these happened
        self.pilot: Pilot | None = None  # The pilot that is reserved for it

    def gets_on(self, saved: bytes) -> None:
        """The call has saved something since this was written: it is written anew."""
        self.saved = saved
        self.losses.clear()
        self.cuts.clear()
        self.faults.clear()

    @property
    def counted(self) -> list[Loss]:
        """Losses that count against the call."""
        return [loss for loss in self.losses if loss.counts]

    @property
    def longest_s(self) -> float:
        """The longest that it ran before it was cut off."""
        return max((cut.ran_s for cut in self.cuts), default=0.0)


# ---- state
JOURNAL_LOST = "the journal had lost a part: clients, pilots and the factory have said anew what they hold"

KEPT_REFUSALS = 200  # What is refused is counted by so many kinds; others count together
KEPT_NOTICES = 20  # The last so many notices of a session are kept


class State:
    """Everything. `now` is the time of the event being handled; `View` in `seams` is how policies see it."""

    def __init__(self, session: str, *, now: float = 0.0) -> None:
        self.session = session
        self.started_at = now
        self.now = now
        self.lease_s = 60.0  # How long pilots wait for an absent manager
        self.clients: dict[ClientId, Client] = {}
        self.clients_by_number: dict[int, Client] = {}
        self.next_client = 0
        self.departed: dict[int, None] = {}  # Numbers of forgotten clients
        self.functions: dict[FunctionKey, FunctionBlob] = {}
        self.unused_functions: dict[FunctionKey, None] = {}  # Not named again, but open calls need them
        self.groups: dict[object, Group] = {}
        self.costs: dict[tuple[str, str], Cost] = {}  # By function and recipe key
        self.unrecorded: dict[Cost, None] = {}  # Those with runs that are not in the performance history yet
        self.recorded_at = 0.0  # When costs of runs were recorded last
        self.contexts: dict[str, Context] = {}
        self.calls: dict[int, Call] = {}
        self.orphans: dict[int, Orphan] = {}  # Running calls that no client has submitted, as the journal knows
        self.streams: dict[int, StreamFacts] = {}  # Running calls that have yielded pieces
        self.failed_at: deque[float] = deque(maxlen=100)  # When events made the core raise
        self.banned: dict[str, str] = {}  # Peers on whose events the core has failed, and what they are told
        self.forgotten: dict[int, None] = {}  # Calls whose end the journal lost; their results may still be read
        self.kept_ends: dict[int, CallEnd] = {}  # Ends from before the journal began again
        self.failed: dict[int, Call] = {}  # The last calls that ended without a result, for their stories
        self.pilots: dict[PilotId, Pilot] = {}
        self.gone_pilots: dict[PilotId, Pilot] = {}  # The last ones, for their stories and their return
        self.libraries: dict[LibraryId, Library] = {}
        self.gone_libraries: dict[LibraryId, Library] = {}  # The last libraries that are gone, for their stories
        self.transfers = Transfers()  # Objects, and who gets them from whom
        self.hungry: dict[str, Context] = {}  # Contexts with waiting calls
        self.reports: dict[int, CallProgress] = {}  # Last progress report of each running call that made one
        self.printed: dict[int, CallProgress] = {}  # How far running calls are that print it and do not say it
        self.forecasts: dict[int, CallForecast] = {}  # When calls are expected to end, as their clients were told last
        self.trials: dict[int, Trial] = {}  # What calls have lost that they ran on, by call
        self.reserved: dict[PilotId, Pilot] = {}  # The pilots that are kept for a call that is to run alone
        self.breaks: dict[int, int] = {}  # How often the ranks of a gang call have lost each other
        self.broken_runs: dict[
            int, float
        ] = {}  # Send time of a gang's run that ended because its ranks lost each other
        self.timers: dict[str, float] = {}
        self.sources: dict[str, SourceState] = {}
        self.blocks: dict[BlockId, Block] = {}  # Those that the manager has asked for and that are not over
        self.past_blocks: dict[BlockId, Block] = {}  # The last ones that are over, for their stories
        self.ended_blocks: dict[str, int] = {}  # How many are over, by how they ended
        self.next_block = 1
        self.factory_trouble = ""  # Why nobody submits blocks just now; empty while somebody does
        self.said_blocks: dict[str, str] = {}  # What a client says of blocks that are its own business
        self.most_pilots: dict[ClientId, int] = {}  # Pilots that each client's own blocks bring at most; 0 = no limit
        self.notices: dict[str, float] = {}  # What users should know, and when it happened last; the oldest first
        self.refused: dict[str, int] = {}  # What was refused or ignored, by kind, counted
        self.tier_seconds: dict[str, float] = {"cold": 0.0, "warm": 0.0}
        self.next_library = 1
        self.done = 0
        self.failures = 0
        self.failure_groups: dict[tuple[str, str, str], CountedFailures] = {}  # By function, error, line
        self.cancelled = 0
        self.losses: dict[LossReason, int] = {}  # Pilots that were lost, by reason
        self.pilots_gone = 0  # However they went
        self.rerun_calls = 0
        self.rate: Counts = deque()  # Calls that ended in each of the last seconds
        self.ending = ""  # Why the session ends, once it does
        self.kept = False  # Whether the session goes on when its clients have left

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
    """What is told of a running call's pieces (see `sending`). It is in no journal, and nothing is decided by it."""

    __slots__ = ("run", "sent", "taken", "waits_since")

    def __init__(self, run: int) -> None:
        self.run = run
        self.sent = 0  # Pieces that its library has sent
        self.taken = 0  # Pieces that its client has acknowledged
        self.waits_since: float | None = None  # Since when the call waits for its reader; None = it does not


class Orphan:
    """A call that a library runs and that the manager has never heard of (see `pilots`)."""

    __slots__ = ("end", "library")

    def __init__(self, library: Library) -> None:
        self.library = library
        self.end: CallEnd | None = None  # How it ended, if it has ended before its client submitted it again
