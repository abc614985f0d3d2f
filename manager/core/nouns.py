"""The manager's records of calls, contexts, libraries, pilots, devices and clients, which policies only read."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import NO_LIMITS, LibraryLimits, Recipe
from stoker.manager.core.call_queue import Queue
from stoker.manager.core.events import ContextAdvice, VerdictAdvice
from stoker.manager.core.per_context import FunctionCost, KindRuns, LoadIndex, Paces, Speeds
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure
from stoker.protocol.ids import CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.protocol.pace import Counts, WorkPace
from stoker.protocol.to_manager import DeviceFacts, LibraryPhase, MapReport
from stoker.protocol.to_pilot import FunctionBlob
from stoker.protocol.wire import Inbox


class CallState(enum.Enum):
    WAITING = "waiting"  # The call is in the queue of its context
    HELD = "held"  # The call was sent to a library or a gang
    ENDED = "ended"  # The call has ended. Its record is kept only so that `stoker explain` can show its history


class LibraryState(enum.Enum):
    LOADING = "loading"  # The library fetches files, starts its process, loads its context, or wakes
    READY = "ready"  # The library has its context loaded and serves calls
    ASLEEP = "asleep"  # The manager ordered the library to sleep, or it sleeps: its context is in host memory
    STOPPING = "stopping"  # The manager ordered the library to stop. Its memory counts as used until it has ended
    GONE = "gone"


class PilotState(enum.Enum):
    HERE = "here"  # The pilot is connected
    CUT = "cut"  # The connection to the pilot broke. The pilot may reconnect with its libraries
    DRAINING = "draining"  # The pilot gets no new calls, and exits when its running calls have ended
    GONE = "gone"  # The pilot has ended or was lost


@dataclass(slots=True, eq=False, repr=False)
class MapRecord:
    """The last progress report of an unfinished map (one function called for many inputs), and the map's speed."""

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
    defined: set[str] = field(default_factory=set)  # Keys of the functions and recipes that this client has sent
    refusals: int = 0  # Number of messages of this client that made the core raise an exception
    # From a restart until the client reconnects: number of its results in the journal; else None
    known_ends: int | None = None
    # While the client submits its calls again: ids of the calls that it has not sent yet; else None
    unnamed: set[int] | None = None
    last_call: int = -1  # Highest id of the client's calls
    maps: dict[int, MapRecord] = field(default_factory=dict)


# A time and the text of an event.
Note = tuple[float, str]

KEPT_CALL_NOTES = 200  # Maximum number of notes of a call. The first and the newest notes are kept
KEPT_PILOT_NOTES = 100  # Maximum number of notes of a pilot in addition to its first note. The newest notes are kept


@dataclass(slots=True, eq=False, repr=False)
class CallGroup:
    """Data that all calls with the same function, context, client and options share."""

    key: object
    client: Client
    context: Context
    cost: FunctionCost
    options: CallOptions
    open_calls: int = 0

    @property
    def function(self) -> FunctionBlob:
        return self.cost.function

    @property
    def expected_run_time_s(self) -> float:
        return self.cost.ordered_s


@dataclass(slots=True, eq=False, repr=False)
class CallHistory:
    """Notes and counts that only few calls need."""

    notes: list[Note] = field(default_factory=list)
    library_deaths: int = 0  # Number of libraries that died while they ran this call
    ends_by_other_calls: int = 0  # Number of times that another call ended the library in which this call ran


class Call(msgspec.Struct, gc=False, eq=False):
    """One invocation of a function. `holder`: the library or gang to which the call was sent, or None.

    `holder` must be None after the call has ended: Python's garbage collector does not track calls, so it cannot free
    a cycle of references.
    """

    id: CallId
    spec: CallSpec
    group: CallGroup
    submitted_at: float
    state: CallState = CallState.WAITING
    holder: Library | Gang | None = None
    sent_at: float = 0.0
    ticket: int = 0
    offered: bool = False
    late: bool = False  # True if the call cannot meet its deadline any more. Its deadline is then ignored
    must_run_alone: bool = False
    history: CallHistory | None = None

    @property
    def notes(self) -> list[Note]:
        return self.history.notes if self.history is not None else []

    @property
    def libraries(self) -> tuple[Library, ...]:
        """Libraries that hold the call: none, one, or the members of its gang."""
        if isinstance(self.holder, Gang):
            return self.holder.members
        return (self.holder,) if self.holder is not None else ()

    def note(self, now: float, text: str) -> None:
        past = self.get_or_create_history()
        past.notes.append((now, text))
        if len(past.notes) > KEPT_CALL_NOTES:
            del past.notes[KEPT_CALL_NOTES // 2]

    def get_or_create_history(self) -> CallHistory:
        if self.history is None:
            self.history = CallHistory()
        return self.history


@dataclass(slots=True, eq=False, repr=False)
class Gang:
    members: tuple[Library, ...]
    address: str = ""  # Network address of rank 0, to which the other ranks connect
    report: tuple[float, float] | None = None  # Time of the last progress report, and number of items done at that time
    ends: dict[LibraryId, CallEnd] = field(default_factory=dict)


class Context:
    __slots__ = (
        "advice", "advised_by", "asleep", "by_kind", "ended", "failed_loads_by_pilot", "index", "last_failure",
        "libraries", "limits", "load_failures", "load_s", "load_total_s", "loads", "loads_cut_by_walltime",
        "longest_cut_load_s", "paces", "pilots_lost_while_loading", "queue", "rate", "recipe", "refusals",
        "reported_limits", "residency_due_at_count", "residency_ran_at", "resident_bytes", "run_s", "run_total_s",
        "runs", "served", "set_aside_call_lacks_library", "sleep_failure", "slots", "speeds", "starved_since",
        "submitted_at", "unsent", "variant_of", "variants", "wake_s",
    )  # fmt: skip

    def __init__(self, recipe: Recipe, *, by_deadline: bool = False, by_run_time: bool = False) -> None:
        self.recipe = recipe
        self.queue: Queue[Call] = Queue(by_deadline=by_deadline, by_run_time=by_run_time)
        self.libraries: dict[LibraryId, Library] = {}
        self.index: LoadIndex[Library] = LoadIndex()  # Ready libraries of the context, sorted by their number of calls
        # By device kind: expected or measured times and memory of the context
        self.advice: dict[str, ContextAdvice] = {}
        self.advised_by = ""  # Source of the advice that arrived before the first load; empty without such advice
        self.paces = Paces()
        # Number of waiting calls at which the residency policy decides about this context again
        self.residency_due_at_count = 1
        self.residency_ran_at = 0.0  # Time at which the residency policy last decided about this context
        self.load_failures = 0  # Number of loads in a row that failed
        self.last_failure: Failure | None = None
        # By pilot: number of failed loads since the last successful load
        self.failed_loads_by_pilot: dict[PilotId, int] = {}
        # Number of offered calls that pilots refused, by reason (`RefusalCase`)
        self.refusals: Counter[str] = Counter()
        # Number of loads in a row that did not end before the walltime of their pilot ended
        self.loads_cut_by_walltime = 0
        # True if a call outside the queue (see `retries`) needs a library on another pilot
        self.set_aside_call_lacks_library = False
        # Pilots that were lost since the last successful load while they did nothing but load this context
        self.pilots_lost_while_loading: list[Pilot] = []
        self.longest_cut_load_s = 0.0  # Longest time in seconds that a load ran before the walltime of its pilot ended
        # Time since which calls wait although no library serves the context; None = a library serves it
        self.starved_since: float | None = None
        self.slots = recipe.slots or 1  # Number of concurrent calls in one library, from the recipe or the last load
        self.loads = 0
        self.load_s = 0.0
        self.load_total_s = 0.0
        self.wake_s = 0.0
        # By device kind: bytes of device memory and of host memory that a sleeping library keeps
        self.asleep: dict[str, tuple[int, int]] = {}
        self.sleep_failure = ""  # Why a library failed to sleep or wake. If this is set, the context never sleeps again
        self.resident_bytes = 0
        self.ended = 0  # Number of ended calls, including cancelled calls
        self.served = 0  # Calls that libraries of the context ran to their end. A gang call counts once per library
        self.rate: Counts = deque()  # Number of calls that ended in each recent second
        self.runs = 0
        self.run_s = 0.0
        self.run_total_s = 0.0
        # Run times by device kind, measured only if the manager compares the kinds
        self.by_kind: dict[str, KindRuns] = {}
        self.speeds = Speeds()
        self.submitted_at = 0.0  # Time at which the last call of the context was submitted
        # Number of calls that open maps will still submit; -1 = unknown, None = no open map
        self.unsent: int | None = None
        self.limits = NO_LIMITS  # Combined limits of all programs on the number of libraries
        # Limits on the number of libraries by program, also of disconnected programs
        self.reported_limits: dict[ClientId, LibraryLimits] = {}
        self.variants: dict[str, Context] = {}  # Other contexts that can run the calls of this context, by recipe key
        self.variant_of: dict[str, Context] = {}  # Contexts whose calls this context can run, by recipe key

    @property
    def idle(self) -> OrderedDict[LibraryId, Library]:
        """Libraries of the context with a free slot. Policies use the last library in this dict first."""
        return self.index.free

    @property
    def starvation_order(self) -> tuple[int, float, int] | None:
        """Sort key among the contexts that lack libraries, smallest first; None if the context has enough libraries."""
        head = self.queue.head()
        if head is None:
            return None
        priority, gang = -head.group.options.priority, head.group.options.gang[0]
        if self.starved_since is not None:
            return priority, self.starved_since, head.id
        if gang > 1 and len(self.usable_libraries) < gang:
            return priority, head.submitted_at, head.id
        return None

    @property
    def usable_libraries(self) -> list[Library]:
        return [library for library in self.libraries.values() if library.is_usable]


class RecordedVerdict(msgspec.Struct, frozen=True):
    """The advisor's verdict on a failed call, or on a failed load (`call` is -1)."""

    at: float
    call: CallId
    devices: tuple[DeviceId, ...]
    verdict: VerdictAdvice


class Device:
    def __init__(self, pilot: Pilot, facts: DeviceFacts, now: float) -> None:
        self.pilot = pilot
        self.facts = facts
        self.id = facts.device
        self.libraries: dict[LibraryId, Library] = {}
        self.promised_bytes = 0  # Bytes of memory promised to the libraries, also to libraries that are stopping
        self.reported = facts.fault  # Fault that the pilot reports for this device; empty if the device works
        # Time at which the quarantine ends, and its reason; None without a quarantine
        self.quarantine: Note | None = None
        self.tier = "cold"
        self.tier_since = now

    @property
    def fault(self) -> str:
        """Why no context may be loaded on this device; empty if the device can be used."""
        return self.reported or (self.quarantine[1] if self.quarantine else "")

    @property
    def free_bytes(self) -> int:
        return max(0, self.facts.memory_bytes - self.promised_bytes)

    @property
    def budget_bytes(self) -> int:
        staying = (x for x in self.libraries.values() if x.state is not LibraryState.STOPPING)
        return self.facts.memory_bytes - sum(library.promised_bytes for library in staying)


class Library:
    __slots__ = (
        "awake_bytes", "batch", "batch_at", "calls_requested_back", "can_sleep", "context", "device_bytes", "devices",
        "ended_at", "functions", "has_confirmed_sleep", "held", "host_bytes", "id", "is_stuck", "kind",
        "last_output_line", "log_position", "memory_bytes", "memory_measurements", "notes", "over_s", "phase",
        "pilot", "promised_bytes", "ready_at", "refusal", "required_bytes", "served", "slots", "started_at", "state",
        "unanswered_resizes", "used_at", "withdrawn_calls",
    )  # fmt: skip

    def __init__(self, id: LibraryId, context: Context, pilot: Pilot, devices: tuple[Device, ...], now: float) -> None:
        self.id = id
        self.context = context
        self.pilot = pilot
        self.devices = devices
        self.kind = devices[0].facts.kind
        self.promised_bytes = 0
        self.slots = context.slots  # Number of concurrent calls, from the context until the library reports its own
        self.state = LibraryState.LOADING
        self.phase = LibraryPhase.STARTING
        self.last_output_line = ""  # Last line that the library has printed during a long load
        self.held: dict[int, Call] = {}  # Calls that were sent to the library and have not ended, by id, oldest first
        # Withdrawn calls that still occupy a slot, by id; True = stop the call even if it runs
        self.withdrawn_calls: dict[int, bool] = {}
        self.functions: set[FunctionKey] = set()  # Functions that were sent to this library
        # True if the running calls take so long that no other call may wait in this library (see `queues`)
        self.is_stuck = False
        # Number of calls that the manager has requested back and that have not returned yet
        self.calls_requested_back = 0
        # Device memory in bytes that the last refused call needed; 0 = refused for another reason
        self.required_bytes = 0
        self.refusal = ""  # Why the pilot last refused a call
        # Seconds by which the last refused call would make a decoding step too long; 0 = refused for another reason
        self.over_s = 0.0
        # Ordered memory sizes in bytes that the pilot has not confirmed yet, oldest first
        self.unanswered_resizes: list[int] = []
        self.can_sleep = False
        self.has_confirmed_sleep = False  # True if the pilot has confirmed the order to sleep
        self.awake_bytes = 0  # Bytes that were promised on each device before the library fell asleep
        self.host_bytes = 0  # Bytes of host memory that are promised to the library while it sleeps or wakes
        self.log_position = 0  # Byte offset in the log at which the output of the ended calls ends
        self.started_at = now
        self.ready_at = now
        self.used_at = now
        self.ended_at = now  # Time at which a call in this library last ended or was withdrawn
        self.served = 0
        self.memory_bytes = 0
        self.device_bytes = 0
        self.memory_measurements: list[tuple[float, int]] = []  # Latest memory measurements: time, and size in bytes
        # Last report of the inference engine about its running batch; None without a report
        self.batch: EngineLoad | None = None
        self.batch_at = now
        self.notes: list[Note] = [(now, f"starts on {', '.join(d.id for d in devices)}")]

    @property
    def load(self) -> int:
        return len(self.held) + len(self.withdrawn_calls)

    @property
    def is_waking(self) -> bool:
        return self.state is LibraryState.LOADING and self.phase is LibraryPhase.WAKING

    @property
    def call_that_runs_alone(self) -> Call | None:
        """The call that runs alone in this library, or None."""
        if len(self.held) != 1:
            return None
        (call,) = self.held.values()
        return call if call.must_run_alone else None

    def admits(self, call: Call) -> bool:
        """True unless the pilot is reserved for another call, a call must run alone, or an earlier run of this call
        still occupies a slot.
        """
        reserved = self.pilot.reserved_for
        if reserved is None and not self.held and not self.withdrawn_calls:  # the most frequent case
            return True
        alone = call.must_run_alone and self.load
        free = reserved is None or reserved is call
        return free and self.call_that_runs_alone is None and not alone and call.id not in self.withdrawn_calls

    def note(self, now: float, text: str) -> None:
        self.notes.append((now, text))

    @property
    def is_usable(self) -> bool:
        """True if the library serves calls, or will serve them after its load."""
        return self.state in (LibraryState.LOADING, LibraryState.READY) and self.pilot.state is PilotState.HERE

    @property
    def is_serving(self) -> bool:
        return self.state is LibraryState.READY and self.pilot.state is PilotState.HERE


class Pilot:
    __slots__ = (
        "advisor_questions", "block", "cache_bytes", "devices", "ended", "ends_at", "failed_loads_in_a_row", "folder",
        "hello_requests", "host", "id", "inbox", "is_loss_settled", "is_released", "lacks", "libraries",
        "longest_walltime_left_s", "loss", "lost_at", "node", "notes", "pid", "rate", "refused_frames",
        "reserved_for", "restorable_libraries", "sleeper_bytes", "source", "state", "state_before_loss", "troubles",
        "unfit_until", "used_at", "verdicts",
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
        # Number of consecutive requests for a new hello. Until the hello arrives, other frames are refused
        self.hello_requests = 0
        self.used_at = now  # Time at which the pilot joined, or its last library ended
        # By function: time of the last question to the advisor, and number of questions
        self.advisor_questions: dict[str, tuple[float, int]] = {}
        # Latest verdicts of the advisor on failures on this pilot, oldest first
        self.verdicts: list[RecordedVerdict] = []
        # By recipe key: time until which the pilot may not load the context, and the reason (see `blame`)
        self.unfit_until: dict[str, Note] = {}
        # By recipe key: number of loads in a row that failed because of the pilot
        self.failed_loads_in_a_row: dict[str, int] = {}
        self.source = ""  # Name of the source of the pilot's block; empty if unknown
        self.node = ""  # Name of the pilot's node in the batch system; empty if unknown
        # By library: the record, promised bytes and state to restore if a lost pilot returns; None = it may not return.
        self.restorable_libraries: dict[LibraryId, tuple[Library, int, LibraryState]] | None = None
        self.state_before_loss = PilotState.HERE  # State of the pilot before it was counted as lost
        # The call that runs alone on this pilot; None if the pilot serves all calls (see `retries`)
        self.reserved_for: Call | None = None
        self.is_released = False  # True if the manager ordered the pilot to exit
        self.loss: LossReason | None = None  # Why the pilot was lost, as far as known; None = not lost (see `blocks`)
        self.is_loss_settled = False
        self.lost_at = 0.0
        # Longest remaining walltime that the pilot has reported, in seconds; 0 = no limit
        self.longest_walltime_left_s = 0.0
        self.ends_at = 0.0  # Time at which the walltime ends; 0 = never
        self.sleeper_bytes = 0  # Bytes of host memory that sleeping libraries may use
        self.ended = 0
        self.rate: Counts = deque()  # Number of calls that ended on this pilot in each recent second
        self.cache_bytes = 0
        self.refused_frames = 0
        self.troubles: tuple[str, ...] = ()  # Problems of the batch job, for example a missing GPU
        self.lacks = ""  # Resources that the site file promises but the pilot does not have; empty if none are missing
        self.notes: list[Note] = [(now, f"joined from {host} (process {pid})")]

    @property
    def free_host_bytes_for_sleep(self) -> int:
        """Unpromised bytes of host memory for sleeping contexts. Promises to stopping libraries count as free."""
        staying = (x for x in self.libraries.values() if x.state is not LibraryState.STOPPING)
        return self.sleeper_bytes - sum(library.host_bytes for library in staying)

    def note(self, now: float, *texts: str) -> None:
        self.notes += [(now, text) for text in texts]
        del self.notes[1:-KEPT_PILOT_NOTES]
