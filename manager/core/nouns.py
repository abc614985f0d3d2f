"""Calls, contexts, libraries, pilots, devices and clients: plain objects that steps change and policies read.

A waiting call has no holder; a held one has one, a `Library` or a `Gang`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import NO_LIMITS, LibraryLimits, Recipe
from stoker.manager.core.call_queue import Queue
from stoker.manager.core.events import ContextAdvice, VerdictAdvice
from stoker.manager.core.per_context import Cost, LoadIndex, Paces
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure
from stoker.protocol.ids import CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.protocol.pace import Counts, WorkPace
from stoker.protocol.to_manager import DeviceFacts, LibraryPhase, MapReport
from stoker.protocol.wire import Inbox


class CallState(enum.Enum):
    WAITING = "waiting"  # In its context's queue
    HELD = "held"  # Sent to a library (or a gang of them), which runs it or will
    ENDED = "ended"  # Its one end has been made; the object lingers only for its story


class LibraryState(enum.Enum):
    LOADING = "loading"  # Told to start; fetches, starts, loads
    READY = "ready"  # Holds its context and serves calls
    STOPPING = "stopping"  # Told to stop; keeps its memory until it is gone
    GONE = "gone"  # Ended


class PilotState(enum.Enum):
    HERE = "here"  # Connected
    CUT = "cut"  # Disconnected; it may return with its libraries
    DRAINING = "draining"  # Told to end when its running calls are done; gets nothing new
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
    defined: set[str] = field(default_factory=set)  # Keys of the functions and recipes that it has defined
    refusals: int = 0  # Number of its events that made the core raise
    known_ends: int | None = None  # Ends in the journal, from a restart to the client's next hello
    unnamed: set[int] | None = None  # While the client submits again: its calls that it has not named yet
    last_call: int = -1  # The highest id among its calls
    maps: dict[int, MapRecord] = field(default_factory=dict)  # Its open maps, as it reports them
    open_calls: int = 0


# A time and an event.
Note = tuple[float, str]

KEPT_CALL_NOTES = 200  # Notes of a call: the first half and the last
KEPT_PILOT_NOTES = 100  # Last notes of a pilot, in addition to the first


class Group:
    """Shared facts of calls of one function, context, client and options."""

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
    """Unusual events of a call, apart because there may be a million calls."""

    notes: list[Note] = field(default_factory=list)
    kills: int = 0
    cuts_beside: int = 0  # How often its library was ended for the sake of another call while it ran there


class Call(msgspec.Struct, gc=False, eq=False):
    """One invocation of a function. The garbage collector does not track calls: `holder`, the only cycle, is cleared
    at the end."""

    id: CallId
    spec: CallSpec
    group: Group
    submitted_at: float
    state: CallState = CallState.WAITING
    holder: Library | Gang | None = None
    sent_at: float = 0.0
    ticket: int = 0
    offered: bool = False
    late: bool = False  # True once it can no longer be in time: its deadline does not count any more
    by_itself: bool = False  # True if it must have a library for itself
    past: CallPast | None = None  # Unusual events of the call; None for nearly every call

    @property
    def notes(self) -> list[Note]:
        return self.past.notes if self.past is not None else []

    @property
    def kills(self) -> int:
        """Libraries that died while it ran in them."""
        return self.past.kills if self.past is not None else 0

    def note(self, now: float, text: str) -> None:
        past = self.remember()
        past.notes.append((now, text))
        if len(past.notes) > KEPT_CALL_NOTES:
            del past.notes[KEPT_CALL_NOTES // 2]

    def remember(self) -> CallPast:
        """Return its past, made on first use."""
        if self.past is None:
            self.past = CallPast()
        return self.past


@dataclass(slots=True, eq=False, repr=False)
class Gang:
    """The libraries that run one call together."""

    members: tuple[Library, ...]
    address: str = ""  # Where rank 0 listens
    report: tuple[float, float] | None = None  # Time and items done of its last report
    ends: dict[LibraryId, CallEnd] = field(default_factory=dict)


class Context:
    __slots__ = (
        "advice", "advised_by", "apart_lacks", "ask_at", "asked_at", "cut_after_s", "cut_loads", "ended", "failed_on",
        "index", "last_failure", "libraries", "limits", "listed_by", "lists", "load_failures", "load_s", "load_total_s",
        "loads", "lost_loads", "paces", "queue", "rate", "recipe", "resident_bytes", "run_s", "run_total_s", "runs",
        "said_limits", "served", "slots", "starved_since",
    )  # fmt: skip

    def __init__(self, recipe: Recipe, *, by_deadline: bool = False, by_run_time: bool = False) -> None:
        self.recipe = recipe
        self.queue: Queue[Call] = Queue(by_deadline=by_deadline, by_run_time=by_run_time)
        self.libraries: dict[LibraryId, Library] = {}
        self.index: LoadIndex[Library] = LoadIndex()  # Its ready libraries by load
        self.advice: dict[str, ContextAdvice] = {}  # By device kind, measured or advised
        self.advised_by = ""  # Where advice came from, if nothing was measured before it came; empty: from nowhere
        self.paces = Paces()  # How long work takes on gangs of each size
        self.ask_at = 1  # Number of waiting calls at which residency is asked again
        self.asked_at = 0.0  # When it was asked last
        self.load_failures = 0  # Loads that failed since one worked
        self.last_failure: Failure | None = None
        self.failed_on: dict[PilotId, int] = {}  # Loads that failed on each pilot since one worked there
        self.cut_loads = 0  # Loads that were under way when the walltime of their pilots was over, since one worked
        self.apart_lacks = False  # True if a call apart (see `retries`) fits none of its libraries
        self.lost_loads: list[Pilot] = []  # Pilots lost while they only loaded it, since a load worked
        self.cut_after_s = 0.0  # Longest cut load, in seconds
        self.starved_since: float | None = None  # Since when calls wait without any usable library
        self.slots = recipe.slots or 1  # Calls that one library runs at once, by recipe or last load
        self.loads = 0
        self.load_s = 0.0
        self.load_total_s = 0.0
        self.resident_bytes = 0
        self.ended = 0  # Ended calls, cancelled ones included
        self.served = 0  # Calls that its libraries ran to their end; a gang's call counts once for each library
        self.rate: Counts = deque()  # Its calls that ended in each of the last seconds
        self.runs = 0
        self.run_s = 0.0
        self.run_total_s = 0.0
        self.limits = NO_LIMITS  # Limits on its libraries, combined over all programs
        self.said_limits: dict[ClientId, LibraryLimits] = {}  # By program, also of absent ones
        self.lists: dict[str, Context] = {}  # Variants that its calls list, by recipe key
        self.listed_by: dict[str, Context] = {}  # Contexts whose calls list this one

    @property
    def idle(self) -> OrderedDict[LibraryId, Library]:
        """Its libraries with a free slot, the hottest last."""
        return self.index.free

    @property
    def lacking(self) -> tuple[int, float, int] | None:
        """Sort key of a context whose first call lacks libraries, or None. The smallest gets devices first."""
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


class Judged(msgspec.Struct, frozen=True):
    """A verdict on a failed call or load (`call` -1) of a pilot."""

    at: float
    call: CallId
    devices: tuple[DeviceId, ...]
    verdict: VerdictAdvice


class Device:
    """One GPU or CPU allotment; `promised_bytes` includes stopping libraries."""

    __slots__ = (
        "facts", "fault", "id", "libraries", "pilot", "promised_bytes", "quarantine", "reported", "tier", "tier_since"
    )  # fmt: skip

    def __init__(self, pilot: Pilot, facts: DeviceFacts, now: float) -> None:
        self.pilot = pilot
        self.facts = facts
        self.id = facts.device
        self.libraries: dict[LibraryId, Library] = {}
        self.promised_bytes = 0
        self.reported = facts.fault  # Fault that its pilot reports; empty while it works
        self.quarantine: Note | None = None  # End and reason of its quarantine
        self.fault = facts.fault  # Reason why nothing is loaded on it; empty while it is in use
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
    """A process that holds one context, or loads it."""

    __slots__ = (
        "batch", "batch_at", "context", "device_bytes", "devices", "ended_at", "functions", "held", "id", "line",
        "measured", "memory_bytes", "notes", "phase", "pilot", "printed_to", "promised_bytes", "ready_at",
        "required_bytes", "resizing", "served", "slots", "started_at", "state", "stuck", "taking", "used_at", "zombies",
    )  # fmt: skip

    def __init__(self, id: LibraryId, context: Context, pilot: Pilot, devices: tuple[Device, ...], now: float) -> None:
        self.id = id
        self.context = context
        self.pilot = pilot
        self.devices = devices
        self.promised_bytes = 0
        self.slots = context.slots  # Calls at once: what it has said, or until then what is known of its context
        self.state = LibraryState.LOADING
        self.phase = LibraryPhase.STARTING
        self.line = ""  # Its last output, if it loads for long
        self.held: dict[int, Call] = {}  # Calls sent and not ended, oldest first
        self.zombies: dict[
            int, bool
        ] = {}  # Calls withdrawn that still take a slot, and whether running ones are stopped
        self.functions: set[FunctionKey] = set()  # Functions that it has been sent
        self.stuck = False  # True if its calls run so long that no call may wait for them (see `queues`)
        self.taking = 0  # Calls that it was asked to give back and has not yet
        self.required_bytes = 0  # Device memory that the last refused call needed; 0 = refused for another reason
        self.resizing: list[int] = []  # Unanswered resizes, oldest first
        self.printed_to = 0  # Where in its log the output of the calls ends that have ended here, in bytes
        self.started_at = now
        self.ready_at = now
        self.used_at = now
        self.ended_at = now  # When a call of it ended, or was taken away, last
        self.served = 0
        self.memory_bytes = 0
        self.device_bytes = 0
        self.measured: list[tuple[float, int]] = []  # Times and sizes of the last memory measurements
        self.batch: EngineLoad | None = None  # Last report of its engine's batch; None without one
        self.batch_at = now
        self.notes: list[Note] = [(now, f"told to load on {', '.join(d.id for d in devices)}")]

    @property
    def load(self) -> int:
        return len(self.held) + len(self.zombies)

    @property
    def suspect(self) -> Call | None:
        """The only call here, if it must run alone."""
        if len(self.held) != 1:
            return None
        (call,) = self.held.values()
        return call if call.by_itself else None

    def admits(self, call: Call) -> bool:
        """True unless a reservation, a suspect or a zombie forbids it."""
        reserved = self.pilot.reserved
        if reserved is None and not self.held and not self.zombies:  # the hot path
            return True
        alone = call.by_itself and self.load
        free = reserved is None or reserved is call
        return free and self.suspect is None and not alone and call.id not in self.zombies

    def note(self, now: float, text: str) -> None:
        self.notes.append((now, text))

    def found(self, now: float) -> None:
        """Begin the story of a library that the manager did not start."""
        places = ", ".join(device.id for device in self.devices)
        self.notes[:] = [(now, f"found on {places}: the manager did not know of it")]

    @property
    def usable(self) -> bool:
        """True if it serves calls, or will."""
        return self.state in (LibraryState.LOADING, LibraryState.READY) and self.pilot.state is PilotState.HERE


class Pilot:
    __slots__ = (
        "asked_why", "block", "cache_bytes", "devices", "ended", "ends_at", "folder", "hellos_asked", "host", "id",
        "inbox", "kept", "lacks", "lasts_s", "libraries", "loss", "loss_settled", "lost_at", "notes", "pid", "rate",
        "refused_frames", "released", "reserved", "source", "state", "troubles", "unfit", "unfit_times", "used_at",
        "verdicts", "was",
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
        self.hellos_asked = 0  # Newer hellos asked for in a row; until one arrives its frames are refused
        self.used_at = now  # When it joined, or its last library ended
        self.asked_why: dict[str, tuple[float, int]] = {}  # Last question about each failing name, and their count
        self.verdicts: list[Judged] = []  # The last verdicts on failures here, oldest first
        self.unfit: dict[str, Note] = {}  # Until when it cannot hold a context, by recipe key, and why (see `blame`)
        self.unfit_times: dict[str, int] = {}  # How often in a row it was found so, by the same keys
        self.source = ""  # The source of its block, if that is known
        self.kept: dict[LibraryId, tuple[Library, int, LibraryState]] | None = (
            None  # Libraries it may return with, their promises and states; None = may not return
        )
        self.was = PilotState.HERE  # Its state before it was given up
        self.reserved: Call | None = None  # The call that has this pilot for itself (see `retries`)
        self.released = False  # True if the manager told it to end
        self.loss: LossReason | None = None  # Why it was lost, as far as is known; None: it was not lost (see `blocks`)
        self.loss_settled = False  # True if that is final
        self.lost_at = 0.0
        self.lasts_s = 0.0  # The most that was ever left of its walltime; 0 = no limit
        self.ends_at = 0.0  # When its walltime is over; 0 = never
        self.ended = 0
        self.rate: Counts = deque()  # Calls that it ended in each of the last seconds
        self.cache_bytes = 0
        self.refused_frames = 0
        self.troubles: tuple[str, ...] = ()  # Faults of its allocation
        self.lacks = ""  # Resources of its site that it lacks; empty if it is complete
        self.notes: list[Note] = [(now, f"joined from {host} (process {pid})")]

    def note(self, now: float, *texts: str) -> None:
        self.notes += [(now, text) for text in texts]
        del self.notes[1:-KEPT_PILOT_NOTES]


# Libraries that a pilot given up may return with, their promised bytes and states.
Kept = dict[LibraryId, tuple[Library, int, LibraryState]]
