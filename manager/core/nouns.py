"""The manager's records: calls, contexts, libraries, pilots, devices and clients. Policies only read them.

A waiting call has no holder; a held call's holder is a `Library` or a `Gang`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import NO_LIMITS, LibraryLimits, Recipe
from stoker.manager.core.call_queue import Queue
from stoker.manager.core.events import ContextAdvice, VerdictAdvice
from stoker.manager.core.per_context import Cost, LoadIndex, Paces
from stoker.manager.core.speeds import KindRuns, Speeds
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure
from stoker.protocol.ids import CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.protocol.pace import Counts, WorkPace
from stoker.protocol.to_manager import DeviceFacts, LibraryPhase, MapReport
from stoker.protocol.wire import Inbox


class CallState(enum.Enum):
    WAITING = "waiting"  # In its context's queue
    HELD = "held"  # Sent to a library or a gang
    ENDED = "ended"  # Ended; the record stays only for the call's history


class LibraryState(enum.Enum):
    LOADING = "loading"  # Fetches, starts, loads or wakes
    READY = "ready"  # Holds its context and serves calls
    ASLEEP = "asleep"  # Told to sleep, or asleep: its context is in host memory (see `sleepers`)
    STOPPING = "stopping"  # Told to stop; its memory counts until it is gone
    GONE = "gone"  # Ended


class PilotState(enum.Enum):
    HERE = "here"  # Connected
    CUT = "cut"  # Disconnected; may return with its libraries
    DRAINING = "draining"  # Exits after its running calls; gets no new calls
    GONE = "gone"  # Ended or lost


@dataclass(slots=True, eq=False, repr=False)
class MapRecord:
    """The last report of an open map, and its pace."""

    report: MapReport
    began_at: float
    pace: WorkPace


@dataclass(slots=True, eq=False, repr=False)
class Client:
    id: ClientId
    number: int
    observer: bool
    factory: bool = False  # True for the factory, which submits blocks
    connected: bool = True
    gone: bool = False
    gone_at: float = 0.0
    inbox: Inbox = field(default_factory=Inbox)
    unacked: deque[CallEnd] = field(default_factory=deque)
    first_unacked: int = 0
    defined: set[str] = field(default_factory=set)  # Keys of the functions and recipes that this client defined
    refusals: int = 0  # Number of the client's events that made the core raise
    known_ends: int | None = None  # Number of its ends in the journal; set from a restart to its next hello
    unnamed: set[int] | None = None  # While the client submits again: ids of calls that it has not repeated yet
    last_call: int = -1  # The highest id of its calls
    maps: dict[int, MapRecord] = field(default_factory=dict)  # Open maps that the client reported
    open_calls: int = 0


# A time and the text of an event.
Note = tuple[float, str]

KEPT_CALL_NOTES = 200  # Most notes kept of a call: the first half and the latest
KEPT_PILOT_NOTES = 100  # Latest notes kept of a pilot, in addition to its first note


class Group:
    """Facts shared by calls of one function, context, client and options."""

    __slots__ = ("client", "context", "cost", "function", "key", "open_calls", "options")

    def __init__(self, key: object, client: Client, context: Context, cost: Cost, options: CallOptions) -> None:
        self.key = key
        self.client = client
        self.cost = cost
        self.function = cost.function
        self.context = context
        self.options = options
        self.open_calls = 0

    @property
    def expected_s(self) -> float:
        """Expected seconds of a run at the last sort; 0 = unknown."""
        return self.cost.ordered_s


@dataclass(slots=True, eq=False, repr=False)
class CallPast:
    """Unusual events of a call; separate, because few calls have any."""

    notes: list[Note] = field(default_factory=list)
    kills: int = 0
    cuts_beside: int = 0  # How often its library was ended because of another call while this call ran


class Call(msgspec.Struct, gc=False, eq=False):
    """One invocation of a function. The garbage collector does not track calls: their end clears their only cycle,
    `holder`.
    """

    id: CallId
    spec: CallSpec
    group: Group
    submitted_at: float
    state: CallState = CallState.WAITING
    holder: Library | Gang | None = None
    sent_at: float = 0.0
    ticket: int = 0
    offered: bool = False
    late: bool = False  # True once the call cannot meet its deadline, which is then ignored
    runs_alone: bool = False  # True if the call must run alone in a library
    past: CallPast | None = None  # Unusual events of the call; None for most calls

    @property
    def notes(self) -> list[Note]:
        return self.past.notes if self.past is not None else []

    @property
    def kills(self) -> int:
        """Libraries that died while they ran this call."""
        return self.past.kills if self.past is not None else 0

    def note(self, now: float, text: str) -> None:
        past = self.remember()
        past.notes.append((now, text))
        if len(past.notes) > KEPT_CALL_NOTES:
            del past.notes[KEPT_CALL_NOTES // 2]

    def remember(self) -> CallPast:
        if self.past is None:
            self.past = CallPast()
        return self.past


@dataclass(slots=True, eq=False, repr=False)
class Gang:
    members: tuple[Library, ...]
    address: str = ""  # Where rank 0 listens
    report: tuple[float, float] | None = None  # Time and number of done items of the last report
    ends: dict[LibraryId, CallEnd] = field(default_factory=dict)


class Context:
    __slots__ = (
        "advice", "advised_by", "apart_lacks", "ask_at", "asked_at", "asleep", "by_kind", "cut_after_s", "cut_loads",
        "ended", "failed_on", "index", "last_failure", "libraries", "limits", "listed_by", "lists", "load_failures",
        "load_s", "load_total_s", "loads", "lost_loads", "paces", "queue", "rate", "recipe", "refusals",
        "reported_limits", "resident_bytes", "run_s", "run_total_s", "runs", "served", "sleep_failure", "slots",
        "speeds", "starved_since", "submitted_at", "unsent", "wake_s",
    )  # fmt: skip

    def __init__(self, recipe: Recipe, *, by_deadline: bool = False, by_run_time: bool = False) -> None:
        self.recipe = recipe
        self.queue: Queue[Call] = Queue(by_deadline=by_deadline, by_run_time=by_run_time)
        self.libraries: dict[LibraryId, Library] = {}
        self.index: LoadIndex[Library] = LoadIndex()  # Its ready libraries by load
        self.advice: dict[str, ContextAdvice] = {}  # By device kind, measured or advised
        self.advised_by = ""  # Source of advice that came before any measurement; empty if none did
        self.paces = Paces()  # Seconds per unit of work, by gang size
        self.ask_at = 1  # Number of waiting calls at which the residency policy runs again
        self.asked_at = 0.0  # When the residency policy last ran for this context
        self.load_failures = 0  # Failed loads since the last successful load
        self.last_failure: Failure | None = None
        self.failed_on: dict[PilotId, int] = {}  # Failed loads on each pilot since its last successful load
        self.refusals: dict[str, int] = {}  # Refused offers by case (`RefusalCase`)
        self.cut_loads = 0  # Loads that a pilot's walltime cut off since the last successful load
        self.apart_lacks = False  # True if a call apart (see `retries`) fits none of its libraries
        self.lost_loads: list[Pilot] = []  # Pilots lost while they only loaded it, since its last successful load
        self.cut_after_s = 0.0  # Longest cut load, in seconds
        self.starved_since: float | None = None  # When calls began to wait without a usable library
        self.slots = recipe.slots or 1  # Concurrent calls of one library, from the recipe or the last load
        self.loads = 0
        self.load_s = 0.0
        self.load_total_s = 0.0
        self.wake_s = 0.0  # Seconds of its last wake
        self.asleep: dict[str, tuple[int, int]] = {}  # Measured device and host bytes of a sleeper, by device kind
        self.sleep_failure = ""  # Why its `sleep` or `wake` failed; then it sleeps no more
        self.resident_bytes = 0
        self.ended = 0  # Ended calls, cancelled ones included
        self.served = 0  # Calls that its libraries ran to their end; a gang's call counts once for each library
        self.rate: Counts = deque()  # Calls that ended in each recent second
        self.runs = 0
        self.run_s = 0.0
        self.run_total_s = 0.0
        self.by_kind: dict[str, KindRuns] = {}  # Runs by device kind, while kinds are compared
        self.speeds = Speeds()  # Speeds of device kinds
        self.submitted_at = 0.0  # When its last call was submitted
        self.unsent: int | None = None  # Calls that open maps will still submit (-1: unknown); None without a map
        self.limits = NO_LIMITS  # Limits on its libraries, combined over all programs
        self.reported_limits: dict[ClientId, LibraryLimits] = {}  # Limits by program, also of absent programs
        self.lists: dict[str, Context] = {}  # Variants that its calls list, by recipe key
        self.listed_by: dict[str, Context] = {}  # Contexts whose calls list this one

    @property
    def idle(self) -> OrderedDict[LibraryId, Library]:
        """Libraries with a free slot, the hottest last."""
        return self.index.free

    @property
    def lacking(self) -> tuple[int, float, int] | None:
        """Sort key of a context whose first call lacks libraries, or None; the smallest gets devices first."""
        head = self.queue.head()
        if head is None:
            return None
        priority, gang = -head.group.options.priority, head.group.options.gang[0]
        if self.starved_since is not None:
            return priority, self.starved_since, head.id
        if gang > 1 and sum(library.usable for library in self.libraries.values()) < gang:
            return priority, head.submitted_at, head.id
        return None


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


class Judged(msgspec.Struct, frozen=True):
    """A verdict on a failed call or load (`call` -1) on a pilot."""

    at: float
    call: CallId
    devices: tuple[DeviceId, ...]
    verdict: VerdictAdvice


class Device:
    """One device; `promised_bytes` includes stopping libraries."""

    __slots__ = (
        "facts", "fault", "id", "libraries", "pilot", "promised_bytes", "quarantine", "reported", "tier", "tier_since",
    )  # fmt: skip

    def __init__(self, pilot: Pilot, facts: DeviceFacts, now: float) -> None:
        self.pilot = pilot
        self.facts = facts
        self.id = facts.device
        self.libraries: dict[LibraryId, Library] = {}
        self.promised_bytes = 0
        self.reported = facts.fault  # Fault that its pilot reports; empty if none
        self.quarantine: Note | None = None  # End and reason of its quarantine
        self.fault = facts.fault  # Reason not to load on this device; empty if usable
        self.tier = "cold"
        self.tier_since = now

    @property
    def free_bytes(self) -> int:
        return max(0, self.facts.memory_bytes - self.promised_bytes)

    @property
    def budget_bytes(self) -> int:
        staying = (x for x in self.libraries.values() if x.state is not LibraryState.STOPPING)
        return self.facts.memory_bytes - sum(library.promised_bytes for library in staying)


class Library:
    __slots__ = (
        "awake_bytes", "batch", "batch_at", "context", "device_bytes", "devices", "ended_at", "functions", "held",
        "host_bytes", "id", "kind", "line", "measured", "memory_bytes", "notes", "over_s", "phase", "pilot",
        "printed_to", "promised_bytes", "ready_at", "refusal", "required_bytes", "resizing", "served", "sleeps",
        "slept", "slots", "started_at", "state", "stuck", "taking", "used_at", "zombies",
    )  # fmt: skip

    def __init__(self, id: LibraryId, context: Context, pilot: Pilot, devices: tuple[Device, ...], now: float) -> None:
        self.id = id
        self.context = context
        self.pilot = pilot
        self.devices = devices
        self.kind = devices[0].facts.kind  # Device kind
        self.promised_bytes = 0
        self.slots = context.slots  # Concurrent calls, as the library reported; before that as known for its context
        self.state = LibraryState.LOADING
        self.phase = LibraryPhase.STARTING
        self.line = ""  # Last output line of a long load
        self.held: dict[int, Call] = {}  # Calls sent and not ended, oldest first
        self.zombies: dict[
            int, bool
        ] = {}  # Withdrawn calls that still take a slot; True = stop the call even if it runs
        self.functions: set[FunctionKey] = set()  # Functions that were sent to this library
        self.stuck = False  # True if its calls run so long that no call may wait for them (see `queues`)
        self.taking = 0  # Calls that the manager asked back and that have not returned yet
        self.required_bytes = 0  # Device memory that the last refused call needed; 0 = refused for another reason
        self.refusal = ""  # Why its pilot last refused a call
        self.over_s = 0.0  # Seconds by which the last refused call would make decode steps too long; 0 = it would not
        self.resizing: list[int] = []  # Unanswered resizes, oldest first
        self.sleeps = False  # True if its context can sleep
        self.slept = False  # True if its pilot has answered the order to sleep
        self.awake_bytes = 0  # Its promise on each device before it slept
        self.host_bytes = 0  # Host memory promised to it while it sleeps or wakes
        self.printed_to = 0  # Offset in its log, in bytes, after the output of the calls that have ended
        self.started_at = now
        self.ready_at = now
        self.used_at = now
        self.ended_at = now  # When a call here last ended or was withdrawn
        self.served = 0
        self.memory_bytes = 0
        self.device_bytes = 0
        self.measured: list[tuple[float, int]] = []  # Times and sizes of the last memory measurements
        self.batch: EngineLoad | None = None  # Last report of its engine's batch; None without one
        self.batch_at = now
        self.notes: list[Note] = [(now, f"starts on {', '.join(d.id for d in devices)}")]

    @property
    def load(self) -> int:
        return len(self.held) + len(self.zombies)

    @property
    def is_waking(self) -> bool:
        return self.state is LibraryState.LOADING and self.phase is LibraryPhase.WAKING

    @property
    def suspect(self) -> Call | None:
        """The only call here, if it must run alone."""
        if len(self.held) != 1:
            return None
        (call,) = self.held.values()
        return call if call.runs_alone else None

    def admits(self, call: Call) -> bool:
        """True unless a reservation, a suspect or a zombie forbids the call."""
        reserved = self.pilot.reserved
        if reserved is None and not self.held and not self.zombies:  # the hot path
            return True
        alone = call.runs_alone and self.load
        free = reserved is None or reserved is call
        return free and self.suspect is None and not alone and call.id not in self.zombies

    def note(self, now: float, text: str) -> None:
        self.notes.append((now, text))

    def found(self, now: float) -> None:
        """Start the history of an unknown library."""
        places = ", ".join(device.id for device in self.devices)
        self.notes[:] = [(now, f"found on {places}: the manager did not know of it")]

    @property
    def usable(self) -> bool:
        """True if the library serves calls, or will."""
        return self.state in (LibraryState.LOADING, LibraryState.READY) and self.pilot.state is PilotState.HERE


class Pilot:
    __slots__ = (
        "asked_why", "block", "cache_bytes", "devices", "ended", "ends_at", "folder", "hellos_asked", "host", "id",
        "inbox", "kept", "lacks", "lasts_s", "libraries", "loss", "loss_settled", "lost_at", "node", "notes", "pid",
        "rate", "refused_frames", "released", "reserved", "sleeper_bytes", "source", "state", "troubles", "unfit",
        "unfit_times", "used_at", "verdicts", "was",
    )  # fmt: skip

    def __init__(self, id: PilotId, *, host: str, pid: int, block: str, folder: str, now: float) -> None:
        self.id = id
        self.host = host
        self.pid = pid
        self.block = block
        self.folder = folder
        self.state = PilotState.HERE
        self.devices: dict[DeviceId, Device] = {}
        self.libraries: dict[LibraryId, Library] = {}
        self.inbox = Inbox()
        self.hellos_asked = 0  # Requests in a row for a newer hello; other frames are refused until one arrives
        self.used_at = now  # When it joined, or its last library ended
        self.asked_why: dict[str, tuple[float, int]] = {}  # Time and number of questions, by failing function
        self.verdicts: list[Judged] = []  # The last verdicts on failures here, oldest first
        self.unfit: dict[str, Note] = {}  # By recipe key: until when, and why, it cannot hold the context (see `blame`)
        self.unfit_times: dict[str, int] = {}  # By the same keys: times in a row that it was unfit
        self.source = ""  # Source of its block; empty if unknown
        self.node = ""  # Name of its node in the batch system; empty if unknown
        self.kept: dict[LibraryId, tuple[Library, int, LibraryState]] | None = (
            None  # Libraries that may return with the pilot, their promises and states; None = it may not return
        )
        self.was = PilotState.HERE  # Its state before it was given up
        self.reserved: Call | None = None  # The call that this pilot is reserved for (see `retries`)
        self.released = False  # True if the manager told it to exit
        self.loss: LossReason | None = None  # Reason of its loss, as far as known; None = not lost (see `blocks`)
        self.loss_settled = False  # True if `loss` is final
        self.lost_at = 0.0
        self.lasts_s = 0.0  # Longest remaining walltime ever seen; 0 = no limit
        self.ends_at = 0.0  # When its walltime ends; 0 = never
        self.sleeper_bytes = 0  # Host memory for sleeping contexts
        self.ended = 0
        self.rate: Counts = deque()  # Calls that ended here in each recent second
        self.cache_bytes = 0
        self.refused_frames = 0
        self.troubles: tuple[str, ...] = ()  # What is wrong with the pilot's allocation, such as a missing GPU
        self.lacks = ""  # Resources of its site that are missing; empty if none
        self.notes: list[Note] = [(now, f"joined from {host} (process {pid})")]

    @property
    def sleeper_budget_bytes(self) -> int:
        """Host memory that no sleeper was promised; stopping libraries do not count."""
        staying = (x for x in self.libraries.values() if x.state is not LibraryState.STOPPING)
        return self.sleeper_bytes - sum(library.host_bytes for library in staying)

    def note(self, now: float, *texts: str) -> None:
        self.notes += [(now, text) for text in texts]
        del self.notes[1:-KEPT_PILOT_NOTES]


# Libraries that may return with a lost pilot, their promised bytes and states.
Kept = dict[LibraryId, tuple[Library, int, LibraryState]]
