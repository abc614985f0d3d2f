"""The manager's state: batch systems (sources), their jobs (blocks), lost pilots and libraries, and session records."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from stoker.manager.core.nouns import Call, CallGroup, Client, Context, Device, Library, Pilot, PilotState
from stoker.manager.core.per_context import FunctionCost
from stoker.manager.core.transfers import Transfers
from stoker.protocol.blocks import ANYWHERE, FORGET_NODE_S, AllowedNodes, BlockPhase, LossReason, NodeRecord, Source
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress, Failure, OutputRange
from stoker.protocol.ids import BlockId, CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.protocol.pace import Counts
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import FunctionBlob

KEPT_BLOCK_NOTES = 50  # Number of latest notes kept for a block, in addition to its first note


@dataclass(slots=True, eq=False, repr=False)
class SourceState:
    source: Source
    # Blocks that have not ended, except blocks that only test a node
    blocks: dict[BlockId, Block] = field(default_factory=dict)
    # This field and the next three contain subsets of `blocks`, because policies read these subsets often.
    abandoned_blocks: dict[BlockId, None] = field(default_factory=dict)
    staying_blocks: dict[BlockId, None] = field(default_factory=dict)  # Blocks that were not released
    # Blocks that were not released and whose first pilot may still join
    coming_blocks: dict[BlockId, None] = field(default_factory=dict)
    # Blocks that were not released and of which some pilots have not joined
    filling_blocks: dict[BlockId, None] = field(default_factory=dict)
    devices: tuple[DeviceFacts, ...] = ()  # Devices of the pilot that joined last from this source
    failures: int = 0  # Number of blocks in a row that were refused or ended without a pilot
    short_lived_count: int = 0  # Number of blocks in a row whose pilots ended early and loaded no context
    failed_at: float = 0.0
    last_failure: str = ""
    has_unusable_pilots: bool = False  # True if the last block failed because its pilots had no usable device
    last_hold_cause: str = ""  # Why the batch system held the last block; empty after a block that was not held
    hold_reason: str = ""  # Why the batch system holds a job, with advice for the user
    stop_reason: str = ""  # Why the manager requests no more blocks, with advice; empty while it requests blocks
    trouble: str = ""  # Current error of the batch system, in its own words
    # Until this time no node is excluded, because the batch system had no other node left
    exclusions_paused_until: float = 0.0

    @property
    def requestable_blocks(self) -> int:
        most = self.source.most
        return min(most - (len(self.blocks) - len(self.abandoned_blocks)), 2 * most - len(self.blocks))


class Block:
    """A batch job that starts pilots."""

    def __init__(self, id: BlockId, source: SourceState, now: float, allowed: AllowedNodes = ANYWHERE) -> None:
        self.id = id
        self.source = source
        self.allowed = allowed
        self.phase = BlockPhase.ASKED
        self.phase_since = now
        self.runs_since = 0.0
        self.job = ""
        self.reason = ""
        self.expected_at = 0.0
        self.emptied_at: float | None = None  # Time at which the block's last pilot left while the job still ran
        self.hold_cause = ""  # Why the batch system last held the job of this block; empty if it was not held
        self.holds = 0
        self.is_abandoned = False  # True if the block was released because its pilots were lost
        # Why the job has ended, as reported by the batch system; None = unknown or not ended
        self.loss: LossReason | None = None
        # Lost pilots for which the batch system has not given a reason yet
        self.pilots_without_loss_reason: dict[PilotId, Pilot] = {}
        self.release_reason = ""  # Why the block was released; empty if it was not released
        self.pilots: dict[PilotId, None] = {}  # Pilots of the block that have not ended
        self.joined_pilots = 0  # Number of pilots of the block that have ever joined
        self.first_pilot_joined_at = 0.0
        self.has_loaded_context = False  # True if one of the pilots of the block has loaded a context
        self.notes: list[tuple[float, str]] = [(now, f"asked of source {source.source.name}")]
        if self.probed_node:
            self.note(now, f"probes node {self.probed_node}")

    def note(self, now: float, text: str) -> None:
        self.notes.append((now, text))
        del self.notes[1:-KEPT_BLOCK_NOTES]

    @property
    def probed_node(self) -> str:
        """Name of the node that the block tests; empty if the block runs calls."""
        return self.allowed.only

    @property
    def is_staying(self) -> bool:
        return not self.release_reason and not self.probed_node

    @property
    def has_expected_pilot(self) -> bool:
        """True if the first pilot of the block may still join."""
        return self.is_staying and not self.pilots and self.emptied_at is None

    @property
    def lacks_some_pilots(self) -> bool:
        """True if some pilots of the block have joined, but not all."""
        return not self.has_expected_pilot and self.is_staying and 0 < self.joined_pilots < self.source.source.nodes


@dataclass(slots=True, eq=False, repr=False)
class Loss:
    """A pilot or library that was lost while a call may have run on it."""

    at: float
    pilot: Pilot
    library: LibraryId
    ran_s: float
    was_alone: bool  # True if the pilot did no other work that can have caused the loss
    failure: Failure | None  # Failure of the library; None if its pilot was lost
    memory_bytes: int  # Maximum measured memory while the call ran; 0 = unknown
    printed: OutputRange | None  # Position of the output of the call in the log; None if its start is unknown

    @property
    def is_counted(self) -> bool:
        """True if the call may have caused the loss. False if the reason is harmless, or if the pilot has returned."""
        return self.failure is not None or (self.pilot.loss is not None and not self.pilot.loss.is_explained)

    @property
    def is_settled(self) -> bool:
        return self.failure is not None or self.pilot.is_loss_settled


@dataclass(slots=True, eq=False, repr=False)
class WalltimeCut:
    """A run of a call that ended because the walltime of its pilot expired."""

    ran_s: float
    walltime_s: float
    # True if the call ran for most of the walltime, so that a new pilot could give it little more time
    counts_against_call: bool
    pilot: PilotId
    library: LibraryId
    log: str


class Fault(msgspec.Struct, frozen=True):
    """A fault that made a call fail. `devices`: faulty devices; empty if the whole node of the pilot is faulty."""

    at: float
    pilot: PilotId
    devices: frozenset[DeviceId]
    avoided_until: float
    pauses_until: float
    failure: Failure


@dataclass(slots=True, eq=False, repr=False)
class CallSetbacks:
    """Why earlier runs of a call did not complete: lost pilots and libraries, walltime cuts, and faults."""

    losses: list[Loss] = field(default_factory=list)
    cuts: list[WalltimeCut] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    saved_progress: bytes = b""  # Progress that was saved before the last loss, cut or fault
    pilot: Pilot | None = None  # Pilot that is reserved for the call

    @property
    def counted_losses(self) -> list[Loss]:
        return [loss for loss in self.losses if loss.is_counted]

    @property
    def longest_cut_run_s(self) -> float:
        return max((cut.ran_s for cut in self.cuts), default=0.0)


@dataclass(slots=True, eq=False, repr=False)
class FailureCount:
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


def forget_oldest(records: dict[Any, Any], *, max_records: int) -> None:
    while len(records) > max_records:
        del records[next(iter(records))]


JOURNAL_LOST = "a part of the journal was lost: clients, pilots and the factory have reported their state again"
KEPT_REFUSALS = 200  # Maximum number of kinds of refused messages that have their own count
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
        self.removed_client_numbers: dict[int, None] = {}
        self.functions: dict[FunctionKey, FunctionBlob] = {}
        # Functions that no client uses any more, but whose calls may still run
        self.unused_functions: dict[FunctionKey, None] = {}
        self.groups: dict[object, CallGroup] = {}
        self.costs: dict[tuple[str, str], FunctionCost] = {}  # Run costs, by function key and recipe key
        # Run costs that have changed since they were last recorded
        self.unrecorded_costs: dict[FunctionCost, None] = {}
        self.runs_recorded_at = 0.0
        self.contexts: dict[str, Context] = {}  # Contexts, by recipe key
        self.calls: dict[int, Call] = {}  # Calls that have not ended
        self.orphans: dict[int, OrphanCall] = {}
        self.streams: dict[int, StreamProgress] = {}
        self.core_failure_times: deque[float] = deque(maxlen=100)  # Times at which the core raised an exception
        self.ban_reasons: dict[str, str] = {}  # By client or pilot: why the manager refuses all its messages
        # Ended calls whose results the journal lost. Their clients may still read the files of the results
        self.calls_with_lost_results: dict[int, None] = {}
        # Results of calls that ended before the current journal began
        self.results_of_old_journal: dict[int, CallEnd] = {}
        self.failed_calls: dict[int, Call] = {}  # Latest failed calls, for their histories
        self.pilots: dict[PilotId, Pilot] = {}  # Pilots that have not ended
        # Pilots that have ended or were lost, latest last. Lost pilots may reconnect
        self.gone_pilots: dict[PilotId, Pilot] = {}
        self.libraries: dict[LibraryId, Library] = {}  # Libraries that have not ended
        self.gone_libraries: dict[LibraryId, Library] = {}  # Latest ended libraries, for their histories
        self.transfers = Transfers()
        self.waiting_contexts: dict[str, Context] = {}  # Contexts with waiting calls, by recipe key
        self.reports: dict[int, CallProgress] = {}  # Last progress report of each call that runs or was evicted
        # Progress of running calls that send no reports, read from their printed output
        self.printed_progress: dict[int, CallProgress] = {}
        self.forecasts: dict[int, CallForecast] = {}  # Last forecast of each call
        self.setbacks: dict[int, CallSetbacks] = {}
        self.reserved_pilots: dict[PilotId, Pilot] = {}
        self.broken_run_counts: dict[int, int] = {}  # By gang call: number of runs that ended because a rank failed
        # By gang call: time at which the manager sent the last run that a rank reported as failed
        self.broken_runs: dict[int, float] = {}
        self.timers: dict[str, float] = {}
        self.sources: dict[str, SourceState] = {}  # Sites that provide pilots, by name
        self.blocks: dict[BlockId, Block] = {}  # Unfinished blocks that the manager requested
        self.past_blocks: dict[BlockId, Block] = {}  # Latest ended blocks, for their histories
        self.ended_blocks: Counter[str] = Counter()  # Number of ended blocks, by the reason of their end
        self.nodes: dict[tuple[str, str], NodeRecord] = {}  # Nodes with failed devices, by source and node
        self.next_block = 1
        self.factory_trouble = ""  # Why no factory submits blocks; empty if a factory submits blocks
        self.reported_blocks: dict[str, str] = {}  # States of the blocks that programs start themselves
        # By client: maximum number of pilots in the blocks that it starts itself; 0 = unlimited
        self.most_pilots: dict[ClientId, int] = {}
        self.notices: dict[str, float] = {}  # Messages to users, with the time of their last occurrence; oldest first
        self.refused: Counter[str] = Counter()  # Number of messages that were refused or ignored, by kind
        self.tier_seconds: dict[str, float] = {"cold": 0.0, "warm": 0.0}
        self.next_library = 1
        self.done = 0
        self.failures = 0
        # Failures that are counted together: by function, error, and line of the error
        self.failure_groups: dict[tuple[str, str, str], FailureCount] = {}
        self.slowest: list[SlowRun] = []  # Longest successful runs, shortest first
        self.cancelled = 0
        self.losses: Counter[LossReason] = Counter()
        self.pilots_gone = 0
        self.rerun_calls = 0
        self.rate: Counts = deque()  # Number of calls that ended in each recent second
        self.end_reason = ""  # Why the session ends; empty until the session ends
        self.outlives_clients = False  # True if the session continues without clients

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
            if pilot.state is PilotState.HERE and pilot.reserved_for is None:
                for device in pilot.devices.values():  # a generator for each pilot would be slower
                    if not device.fault:
                        yield device

    def find_block_of_pilot(self, pilot: Pilot) -> Block | None:
        id = BlockId(pilot.block)
        return self.blocks.get(id) or self.past_blocks.get(id)

    def excluded_nodes(self, source: SourceState) -> list[NodeRecord]:
        """Return the nodes on which no block of a source may start, the earliest excluded first."""
        of_source = (x for x in self.nodes.values() if x.excluded and x.source == source.source.name)
        found = [record for record in of_source if self.now - record.heard_at < FORGET_NODE_S]
        found.sort(key=lambda record: (record.since, record.node))
        return found[: source.source.exclude_nodes]

    def add_notice(self, text: str) -> None:
        self.notices.pop(text, None)
        self.notices[text] = self.now
        forget_oldest(self.notices, max_records=KEPT_NOTICES)

    def count_refusal(self, what: str, count: int = 1) -> None:
        if len(self.refused) >= KEPT_REFUSALS and what not in self.refused:
            what = "other kinds of refusals"
        self.refused[what] += count


@dataclass(slots=True, eq=False, repr=False)
class StreamProgress:
    """Numbers of result pieces: sent by a call, and acknowledged by its client."""

    run: int
    sent: int = 0
    taken: int = 0
    # Time since which the call waits for its client to read pieces; None = it does not wait
    waits_since: float | None = None


@dataclass(slots=True, eq=False, repr=False)
class OrphanCall:
    """A call that runs on a pilot although the manager has lost its record of the call (see `pilots`)."""

    library: Library
    end: CallEnd | None = None  # Result of the call, if it ended before its client submitted it again
