"""The manager's state: sources and blocks of pilots, losses of pilots and libraries, and the session's records."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from stoker.manager.core.nouns import Call, Client, Context, Device, Group, Library, Pilot, PilotState
from stoker.manager.core.per_context import Cost
from stoker.manager.core.transfers import Transfers
from stoker.protocol.blocks import ANYWHERE, FORGET_NODE_S, AllowedNodes, BlockPhase, LossReason, NodeRecord, Source
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress, Failure, Printed
from stoker.protocol.ids import BlockId, CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.protocol.pace import Counts
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import FunctionBlob

KEPT_BLOCK_NOTES = 50  # Number of latest notes kept for a block, in addition to its first note


@dataclass(slots=True, eq=False, repr=False)
class SourceState:
    source: Source
    blocks: dict[BlockId, Block] = field(default_factory=dict)  # Open blocks without probes, which run no calls
    # Some of these blocks; changed with them, because policies read the lists often
    abandoned: dict[BlockId, None] = field(default_factory=dict)
    staying: dict[BlockId, None] = field(default_factory=dict)  # Blocks that were not released
    coming: dict[BlockId, None] = field(default_factory=dict)  # Blocks of `staying` whose first pilot may still join
    filling: dict[BlockId, None] = field(default_factory=dict)  # Blocks of `staying` that lack some of their pilots
    devices: tuple[DeviceFacts, ...] = ()  # Devices of the last pilot of this source
    failures: int = 0  # Number of blocks in a row that were refused or ended without a pilot
    short_lived: int = 0  # Number of blocks in a row whose pilots ended early and loaded nothing
    failed_at: float = 0.0
    last_failure: str = ""
    useless: bool = False  # True if the last block failed because its pilots had no usable device
    held_for: str = ""  # Why the batch system held the last block; empty if a later block ended without a hold
    hold: str = ""  # Why the batch system holds a job, with advice for the user
    stopped: str = ""  # Why no more blocks are requested, with advice; empty while blocks are requested
    trouble: str = ""  # Current error of the batch system, in its own words
    spares_until: float = 0.0  # Time until which the source excludes no node, because no other node was left

    @property
    def room(self) -> int:
        most = self.source.most
        return min(most - (len(self.blocks) - len(self.abandoned)), 2 * most - len(self.blocks))


class Block:
    """A batch job that starts pilots."""

    def __init__(self, id: BlockId, source: SourceState, now: float, allowed: AllowedNodes = ANYWHERE) -> None:
        self.id = id
        self.source = source
        self.allowed = allowed
        self.phase = BlockPhase.ASKED
        self.since = now
        self.runs_since = 0.0
        self.job = ""
        self.reason = ""
        self.expected_at = 0.0
        self.emptied_at: float | None = None  # Time at which the block's last pilot left while the job still ran
        self.held_for = ""  # Why the batch system last held the block's job; empty if the job was not held
        self.holds = 0
        self.abandoned = False  # True if the block was released because its pilots were lost
        self.loss: LossReason | None = None  # Why the block's job has ended, as reported by the batch system
        self.unsettled: dict[PilotId, Pilot] = {}  # Lost pilots for which the batch system has not given a reason yet
        self.leaving = ""  # Why the block was released; empty if it was not released
        self.pilots: dict[PilotId, None] = {}  # Pilots of the block that have not ended
        self.brought = 0  # Number of pilots of the block that have ever joined
        self.brought_at = 0.0
        self.proved = False  # True if a context was loaded on one of the block's pilots
        self.notes: list[tuple[float, str]] = [(now, f"asked of source {source.source.name}")]
        if self.probes:
            self.note(now, f"probes node {self.probes}")

    def note(self, now: float, text: str) -> None:
        self.notes.append((now, text))
        del self.notes[1:-KEPT_BLOCK_NOTES]

    @property
    def probes(self) -> str:
        """Name of the node that the block tests; empty if the block runs calls."""
        return self.allowed.only

    @property
    def staying(self) -> bool:
        return not self.leaving and not self.probes

    @property
    def coming(self) -> bool:
        """True if the first pilot of the block may still join."""
        return self.staying and not self.pilots and self.emptied_at is None

    @property
    def filling(self) -> bool:
        """True if some pilots of the block have joined, but not all."""
        return not self.coming and self.staying and 0 < self.brought < self.source.source.nodes


@dataclass(slots=True, eq=False, repr=False)
class Loss:
    """A pilot or library that was lost while a call may have run on it."""

    at: float
    pilot: Pilot
    library: LibraryId
    ran_s: float
    alone: bool  # True if no other work on the pilot can be the cause of the loss
    failure: Failure | None  # Failure of the library; None if its pilot was lost
    memory_bytes: int  # Maximum measured memory while the call ran; 0 = unknown
    printed: Printed | None  # Position of the call's output in the log; None if its start is unknown

    @property
    def counts(self) -> bool:
        """True unless the loss has a harmless reason or its pilot returned."""
        return self.failure is not None or (self.pilot.loss is not None and not self.pilot.loss.explained)

    @property
    def is_settled(self) -> bool:
        return self.failure is not None or self.pilot.loss_settled


@dataclass(slots=True, eq=False, repr=False)
class Cut:
    """A run of a call that ended because the walltime of its pilot expired."""

    ran_s: float
    walltime_s: float
    whole: bool  # True if the call had most of the walltime, so that a new pilot would hardly give it more time
    pilot: PilotId
    library: LibraryId
    log: str


class Fault(msgspec.Struct, frozen=True):
    """A fault of devices. An empty `devices` means a fault of the pilot's node."""

    at: float
    pilot: PilotId
    devices: frozenset[DeviceId]
    avoided_until: float
    pauses_until: float
    failure: Failure


@dataclass(slots=True, eq=False, repr=False)
class Trial:
    """The losses, cuts and faults of an open call."""

    losses: list[Loss] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    saved: bytes = b""  # Progress that was saved before the last loss, cut or fault
    pilot: Pilot | None = None  # Pilot that is reserved for the call

    @property
    def counted(self) -> list[Loss]:
        return [loss for loss in self.losses if loss.counts]

    @property
    def longest_s(self) -> float:
        return max((cut.ran_s for cut in self.cuts), default=0.0)


@dataclass(slots=True, eq=False, repr=False)
class CountedFailures:
    first_at: float
    last_at: float = 0.0
    count: int = 0
    call: int = -1
    message: str = ""


class SlowRun(NamedTuple):
    run_s: float
    call: CallId
    function: str
    context: str
    pilot: PilotId
    ended_at: float


def forget_oldest(records: dict[Any, Any], *, most: int) -> None:
    while len(records) > most:
        del records[next(iter(records))]


JOURNAL_LOST = "a part of the journal was lost: clients, pilots and the factory have reported their state again"
KEPT_REFUSALS = 200  # Maximum number of kinds of refused messages that are counted separately
KEPT_NOTICES = 20


class State:
    """The state of the manager. Policies read the state through a `seams.View`."""

    def __init__(self, session: str, *, now: float = 0.0) -> None:
        self.session = session
        self.started_at = now
        self.now = now  # Seconds on the manager's clock
        self.lease_s = 60.0  # Seconds that pilots wait for an absent manager
        self.clients: dict[ClientId, Client] = {}
        self.clients_by_number: dict[int, Client] = {}
        self.next_client = 0
        self.departed: dict[int, None] = {}  # Numbers of removed clients
        self.functions: dict[FunctionKey, FunctionBlob] = {}
        self.unused_functions: dict[FunctionKey, None] = {}  # Functions that a client dropped; open calls may need them
        self.groups: dict[object, Group] = {}
        self.costs: dict[tuple[str, str], Cost] = {}  # Run costs, by function key and recipe key
        self.unrecorded: dict[Cost, None] = {}  # Costs with runs that are not recorded yet
        self.recorded_at = 0.0
        self.contexts: dict[str, Context] = {}  # Contexts, by recipe key
        self.calls: dict[int, Call] = {}  # Calls that have not ended
        self.orphans: dict[int, Orphan] = {}
        self.streams: dict[int, StreamFacts] = {}
        self.failed_at: deque[float] = deque(maxlen=100)  # Times at which events made the core raise an exception
        self.banned: dict[str, str] = {}  # Peers whose events made the core raise an exception, with the reason
        self.forgotten: dict[int, None] = {}  # Calls whose end the journal lost; their results may still be read
        self.kept_ends: dict[int, CallEnd] = {}  # Results of calls that ended before the new journal began
        self.failed: dict[int, Call] = {}  # Latest failed calls, for their histories
        self.pilots: dict[PilotId, Pilot] = {}  # Pilots that have not ended
        self.gone_pilots: dict[PilotId, Pilot] = {}  # Latest ended or lost pilots, which may reconnect
        self.libraries: dict[LibraryId, Library] = {}  # Libraries that have not ended
        self.gone_libraries: dict[LibraryId, Library] = {}  # Latest ended libraries, for their histories
        self.transfers = Transfers()
        self.waiting_contexts: dict[str, Context] = {}  # Contexts with waiting calls, by recipe key
        self.reports: dict[int, CallProgress] = {}  # Last progress report of each running or evicted call
        self.printed: dict[int, CallProgress] = {}  # Progress that running calls without reports have printed
        self.forecasts: dict[int, CallForecast] = {}  # Last forecast of each call
        self.trials: dict[int, Trial] = {}
        self.reserved: dict[PilotId, Pilot] = {}
        self.breaks: dict[int, int] = {}  # Number of broken runs, by id of the gang call
        self.broken_runs: dict[int, float] = {}  # By gang call: send time of the last run whose failure a rank reported
        self.timers: dict[str, float] = {}
        self.sources: dict[str, SourceState] = {}  # Sites that provide pilots, by name
        self.blocks: dict[BlockId, Block] = {}  # Open blocks that the manager requested
        self.past_blocks: dict[BlockId, Block] = {}  # Latest ended blocks, for their histories
        self.ended_blocks: Counter[str] = Counter()  # Number of ended blocks, by how they ended
        self.nodes: dict[tuple[str, str], NodeRecord] = {}  # Nodes with failed devices, by source and node
        self.next_block = 1
        self.factory_trouble = ""  # Why no factory submits blocks; empty if a factory submits blocks
        self.reported_blocks: dict[str, str] = {}  # States of the blocks that clients start themselves
        self.most_pilots: dict[ClientId, int] = {}  # Maximum pilots in each client's own blocks; 0 = no maximum
        self.notices: dict[str, float] = {}  # Notices for users, with the time of the last occurrence; oldest first
        self.refused: Counter[str] = Counter()  # Number of refused or ignored messages, by kind
        self.tier_seconds: dict[str, float] = {"cold": 0.0, "warm": 0.0}
        self.next_library = 1
        self.done = 0
        self.failures = 0
        self.failure_groups: dict[tuple[str, str, str], CountedFailures] = {}  # Failures, by function, error and line
        self.slowest: list[SlowRun] = []  # Longest successful runs, shortest first
        self.cancelled = 0
        self.losses: Counter[LossReason] = Counter()
        self.pilots_gone = 0
        self.rerun_calls = 0
        self.rate: Counts = deque()  # Number of calls that ended in each recent second
        self.ending = ""  # Why the session ends; empty until the session ends
        self.kept = False  # True if the session continues without clients

    @property
    def lost_pilots(self) -> int:
        return self.losses.total()

    @property
    def ends_per_s(self) -> int:
        """Number of calls that ended in the last whole second."""
        before = int(self.now) - 1
        for second, count in reversed(self.rate):
            if second <= before:
                return count if second == before else 0
        return 0

    def devices(self) -> Iterator[Device]:
        for pilot in self.pilots.values():
            if pilot.state is PilotState.HERE and pilot.reserved is None:
                for device in pilot.devices.values():  # a generator for each pilot would be slower
                    if not device.fault:
                        yield device

    def block_of(self, pilot: Pilot) -> Block | None:
        id = BlockId(pilot.block)
        return self.blocks.get(id) or self.past_blocks.get(id)

    def excluded_nodes(self, source: SourceState) -> list[NodeRecord]:
        """Return the nodes on which no block of a source may start, the earliest excluded first."""
        of_source = (x for x in self.nodes.values() if x.excluded and x.source == source.source.name)
        found = [record for record in of_source if self.now - record.heard_at < FORGET_NODE_S]
        found.sort(key=lambda record: (record.since, record.node))
        return found[: source.source.exclude_nodes]

    def notice(self, text: str) -> None:
        self.notices.pop(text, None)
        self.notices[text] = self.now
        forget_oldest(self.notices, most=KEPT_NOTICES)

    def refuse(self, what: str, count: int = 1) -> None:
        if len(self.refused) >= KEPT_REFUSALS and what not in self.refused:
            what = "other kinds of refusals"
        self.refused[what] += count


@dataclass(slots=True, eq=False, repr=False)
class StreamFacts:
    """Numbers of result pieces: sent by a call, and acknowledged by its client."""

    run: int
    sent: int = 0
    taken: int = 0
    waits_since: float | None = None  # Time since which the call waits until its client reads pieces; None = no wait


@dataclass(slots=True, eq=False, repr=False)
class Orphan:
    """A call that runs although the manager has no record of it (see `pilots`)."""

    library: Library
    end: CallEnd | None = None  # How the call ended, if it ended before its client submitted it again
