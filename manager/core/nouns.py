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
from stoker.manager.core.per_context import Cost, KindRuns, LoadIndex, Paces, Speeds
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
    ENDED = "ended"  # The call has ended; its record is kept only for its history


class LibraryState(enum.Enum):
    LOADING = "loading"  # The library fetches, starts, loads or wakes
    READY = "ready"  # The library has its context loaded and serves calls
    ASLEEP = "asleep"  # The library was ordered to sleep, or sleeps with its context in host memory
    STOPPING = "stopping"  # The library was ordered to stop; its memory counts until it has ended
    GONE = "gone"


class PilotState(enum.Enum):
    HERE = "here"  # The pilot is connected
    CUT = "cut"  # The pilot is disconnected and may reconnect with its libraries
    DRAINING = "draining"  # The pilot gets no new calls and exits after its running calls
    GONE = "gone"  # The pilot has ended or was lost


@dataclass(slots=True, eq=False, repr=False)
class MapRecord:
    """The last progress report of an open map, and its speed."""

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
    refusals: int = 0  # Number of the client's events that made the core raise an exception
    known_ends: int | None = None  # Results in the journal, from a restart until the client's hello; else None
    unnamed: set[int] | None = None  # During a resubmission: ids of calls that the client has not repeated yet
    last_call: int = -1  # Highest id of the client's calls
    maps: dict[int, MapRecord] = field(default_factory=dict)


# A time and the text of an event.
Note = tuple[float, str]

KEPT_CALL_NOTES = 200  # Maximum number of notes of a call. If there are more, the first and the newest are kept
KEPT_PILOT_NOTES = 100  # Number of newest notes of a pilot that are kept, in addition to the first note


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """Data that all calls with the same function, context, client and options share."""

    key: object
    client: Client
    context: Context
    cost: Cost
    options: CallOptions
    open_calls: int = 0

    @property
    def function(self) -> FunctionBlob:
        return self.cost.function

    @property
    def expected_s(self) -> float:
        return self.cost.ordered_s


@dataclass(slots=True, eq=False, repr=False)
class CallPast:
    """Notes and counts that only few calls need."""

    notes: list[Note] = field(default_factory=list)
    kills: int = 0  # Number of libraries that died while they ran this call
    cuts_beside: int = 0  # Number of times that another call ended the library while this call ran


class Call(msgspec.Struct, gc=False, eq=False):
    """One invocation of a function. `holder`: the library or gang that holds the call, or None. The field is cleared at
    the end, because the garbage collector does not track calls.
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
    late: bool = False  # True if the call cannot meet its deadline; the deadline is then ignored
    runs_alone: bool = False
    past: CallPast | None = None

    @property
    def notes(self) -> list[Note]:
        return self.past.notes if self.past is not None else []

    @property
    def libraries(self) -> tuple[Library, ...]:
        """Libraries that hold the call: none, one, or the members of its gang."""
        if isinstance(self.holder, Gang):
            return self.holder.members
        return (self.holder,) if self.holder is not None else ()

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
    address: str = ""  # Address at which rank 0 listens
    report: tuple[float, float] | None = None  # Time of the last report, and number of items done by then
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
        self.index: LoadIndex[Library] = LoadIndex()  # Ready libraries of the context, by load
        self.advice: dict[str, ContextAdvice] = {}  # Times and memory by device kind, measured or advised
        self.advised_by = ""  # Source of the advice that arrived before any measurement; empty without such advice
        self.paces = Paces()
        self.ask_at = 1  # Number of waiting calls at which the residency policy runs again
        self.asked_at = 0.0  # Time at which the residency policy last ran for this context
        self.load_failures = 0  # Number of failed loads since the last successful load
        self.last_failure: Failure | None = None
        self.failed_on: dict[PilotId, int] = {}  # Number of failed loads by pilot since the pilot's last success
        self.refusals: Counter[str] = Counter()  # Number of refused offers by case (`RefusalCase`)
        self.cut_loads = 0  # Loads that the walltime of a pilot cut off since the last successful load
        self.apart_lacks = False  # True if a call that waits apart (see `retries`) needs a new library on another pilot
        self.lost_loads: list[Pilot] = []  # Pilots lost while they loaded only this context, since the last success
        self.cut_after_s = 0.0  # Seconds of the longest load that was cut off
        self.starved_since: float | None = None  # Time at which calls began to wait without a usable library
        self.slots = recipe.slots or 1  # Concurrent calls of one library, from the recipe or the last load
        self.loads = 0
        self.load_s = 0.0
        self.load_total_s = 0.0
        self.wake_s = 0.0
        self.asleep: dict[str, tuple[int, int]] = {}  # Device and host bytes of a sleeping library, by device kind
        self.sleep_failure = ""  # Why `sleep` or `wake` failed; if set, the context never sleeps again
        self.resident_bytes = 0
        self.ended = 0  # Number of ended calls, including cancelled calls
        self.served = 0  # Calls that libraries of the context ran to their end. A gang call counts once per library
        self.rate: Counts = deque()  # Number of calls that ended in each recent second
        self.runs = 0
        self.run_s = 0.0
        self.run_total_s = 0.0
        self.by_kind: dict[str, KindRuns] = {}  # Runs by device kind, recorded while kinds are compared
        self.speeds = Speeds()
        self.submitted_at = 0.0  # Time at which the last call of the context was submitted
        self.unsent: int | None = None  # Calls that open maps will still submit (-1: unknown); None without a map
        self.limits = NO_LIMITS  # Limits on the number of libraries, combined over all programs
        self.reported_limits: dict[ClientId, LibraryLimits] = {}  # Limits by program, including absent programs
        self.lists: dict[str, Context] = {}  # By recipe key: variants that the calls of this context accept
        self.listed_by: dict[str, Context] = {}  # Contexts whose calls accept this context as a variant, by recipe key

    @property
    def idle(self) -> OrderedDict[LibraryId, Library]:
        """Libraries of the context with a free slot. The last library in this dict is used first."""
        return self.index.free

    @property
    def lacking(self) -> tuple[int, float, int] | None:
        """Sort key of a context whose first waiting call lacks libraries, else None; the smallest is served first."""
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
        return [library for library in self.libraries.values() if library.usable]


class Judged(msgspec.Struct, frozen=True):
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
        self.promised_bytes = 0  # Memory promised to libraries, including libraries that are stopping
        self.reported = facts.fault  # Fault that the pilot reports; empty if none
        self.quarantine: Note | None = None  # End time and reason of the quarantine
        self.tier = "cold"
        self.tier_since = now

    @property
    def fault(self) -> str:
        """Why no library may load on this device; empty if usable."""
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
        self.kind = devices[0].facts.kind
        self.promised_bytes = 0
        self.slots = context.slots  # Concurrent calls; the value of the context until the library reports its own
        self.state = LibraryState.LOADING
        self.phase = LibraryPhase.STARTING
        self.line = ""  # Last output line of a long load
        self.held: dict[int, Call] = {}  # Calls that were sent and have not ended, oldest first
        self.zombies: dict[int, bool] = {}  # Withdrawn calls that occupy a slot; True = stop the call even if it runs
        self.functions: set[FunctionKey] = set()  # Functions that were sent to this library
        self.stuck = False  # True if running calls take so long that no call may wait here (see `queues`)
        self.taking = 0  # Calls that the manager has requested back and that have not returned yet
        self.required_bytes = 0  # Device memory that the last refused call needed; 0 = refused for another reason
        self.refusal = ""  # Why the pilot last refused a call
        self.over_s = 0.0  # Seconds by which the last refused call would exceed the limit of a decode step; 0 = none
        self.resizing: list[int] = []  # Resize orders without an answer, oldest first
        self.sleeps = False  # True if the context can sleep
        self.slept = False  # True if the pilot has answered the order to sleep
        self.awake_bytes = 0  # Bytes promised on each device before the library slept
        self.host_bytes = 0  # Host memory promised to the library while it sleeps or wakes
        self.printed_to = 0  # Byte offset in the log after the output of the ended calls
        self.started_at = now
        self.ready_at = now
        self.used_at = now
        self.ended_at = now  # Time at which a call in this library last ended or was withdrawn
        self.served = 0
        self.memory_bytes = 0
        self.device_bytes = 0
        self.measured: list[tuple[float, int]] = []  # Times and sizes of the latest memory measurements
        self.batch: EngineLoad | None = None  # Last report on the engine's batch; None without a report
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
        """The call that runs alone in this library, or None."""
        if len(self.held) != 1:
            return None
        (call,) = self.held.values()
        return call if call.runs_alone else None

    def admits(self, call: Call) -> bool:
        """True unless the pilot is reserved for another call, a call must run alone, or an earlier run of this call
        still occupies a slot.
        """
        reserved = self.pilot.reserved
        if reserved is None and not self.held and not self.zombies:  # the most frequent case
            return True
        alone = call.runs_alone and self.load
        free = reserved is None or reserved is call
        return free and self.suspect is None and not alone and call.id not in self.zombies

    def note(self, now: float, text: str) -> None:
        self.notes.append((now, text))

    @property
    def usable(self) -> bool:
        """True if the library serves calls, or will serve them after its load."""
        return self.state in (LibraryState.LOADING, LibraryState.READY) and self.pilot.state is PilotState.HERE

    @property
    def is_serving(self) -> bool:
        return self.state is LibraryState.READY and self.pilot.state is PilotState.HERE


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
        self.hellos_asked = 0  # Requests in a row for a new hello; other frames are refused until the hello arrives
        self.used_at = now  # Time at which the pilot joined, or its last library ended
        self.asked_why: dict[str, tuple[float, int]] = {}  # By function: time of the last question, number of questions
        self.verdicts: list[Judged] = []  # Latest verdicts on failures on this pilot, oldest first
        self.unfit: dict[str, Note] = {}  # Until when and why the pilot is unfit (see `blame`), by recipe key
        self.unfit_times: dict[str, int] = {}  # Number of times in a row that the pilot was unfit, by recipe key
        self.source = ""  # Name of the source of the pilot's block; empty if unknown
        self.node = ""  # Name of the pilot's node in the batch system; empty if unknown
        # Libraries that may return with a lost pilot, their promises and states; None = the pilot may not return.
        self.kept: dict[LibraryId, tuple[Library, int, LibraryState]] | None = None
        self.was = PilotState.HERE  # State of the pilot before it was counted as lost
        self.reserved: Call | None = None  # The call for which this pilot is reserved (see `retries`)
        self.released = False  # True if the manager ordered the pilot to exit
        self.loss: LossReason | None = None  # Why the pilot was lost, as far as known; None = not lost (see `blocks`)
        self.loss_settled = False
        self.lost_at = 0.0
        self.lasts_s = 0.0  # Largest remaining walltime ever reported, in seconds; 0 = no limit
        self.ends_at = 0.0  # Time at which the walltime ends; 0 = never
        self.sleeper_bytes = 0  # Bytes of host memory for sleeping contexts
        self.ended = 0
        self.rate: Counts = deque()  # Number of calls that ended on this pilot in each recent second
        self.cache_bytes = 0
        self.refused_frames = 0
        self.troubles: tuple[str, ...] = ()  # Problems of the pilot's allocation, such as a missing GPU
        self.lacks = ""  # Resources that the site promises but the pilot does not have; empty if none
        self.notes: list[Note] = [(now, f"joined from {host} (process {pid})")]

    @property
    def free_host_bytes_for_sleep(self) -> int:
        """Unpromised bytes of host memory for sleeping contexts. Promises to stopping libraries count as free."""
        staying = (x for x in self.libraries.values() if x.state is not LibraryState.STOPPING)
        return self.sleeper_bytes - sum(library.host_bytes for library in staying)

    def note(self, now: float, *texts: str) -> None:
        self.notes += [(now, text) for text in texts]
        del self.notes[1:-KEPT_PILOT_NOTES]
