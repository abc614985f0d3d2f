"""The nouns of the manager: clients, calls, contexts, libraries, pilots, devices, and the queues between them.

Plain slotted objects, changed only by this package. Policies see them through the read-only Protocols of `seams`.
What exists only in one state lives in that state's type: a waiting call has no library, a held one has exactly one
holder (a `Library`, or a `Gang` of them).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.manager.core.events import ContextAdvice
from stoker.manager.core.paces import Paces
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.core.queue import Queue
from stoker.manager.core.sources import Block, SourceState
from stoker.manager.core.transfers import Transfers
from stoker.manager.core.trials import Trial
from stoker.manager.protocol.blocks import LossReason
from stoker.manager.protocol.calls import CallEnd, CallForecast, CallOptions, CallProgress, CallSpec, Failure
from stoker.manager.protocol.ids import BlockId, CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.manager.protocol.recent import Counts
from stoker.manager.protocol.reliable import Inbox
from stoker.manager.protocol.to_manager import DeviceFacts, LibraryPhase
from stoker.manager.protocol.to_pilot import FunctionBlob

Note = tuple[float, str]
"""When, and what happened."""


JOURNAL_LOST = "the journal had lost a part: clients, pilots and the factory have said anew what they hold"
"""A notice of the session."""

KEPT_CALL_NOTES = 200
"""A call keeps so many notes, the first half of them and the last."""
KEPT_REFUSALS = 200
"""What is refused is counted by so many kinds; others count together."""
KEPT_NOTICES = 20
"""The last so many notices of a session are kept."""


class Client:
    """Somebody who submits calls."""

    __slots__ = (
        "connected", "defined", "factory", "first_unacked", "gone", "gone_at", "id", "inbox", "known_ends", "last_call",
        "number", "observer", "open_calls", "refusals", "unacked", "unnamed",
    )  # fmt: skip

    def __init__(self, id: ClientId, *, number: int, observer: bool) -> None:
        self.id = id
        self.number = number
        self.observer = observer
        self.factory = False
        """Whether it is the one that submits blocks."""
        self.connected = True
        self.gone = False
        self.gone_at = 0.0
        self.inbox = Inbox()
        self.unacked: deque[CallEnd] = deque()
        self.first_unacked = 0
        self.defined: set[str] = set()
        """Keys of the functions and recipes that it has defined."""
        self.refusals = 0
        """How many of its events made the core raise."""
        self.known_ends: int | None = None
        """From a restart of the manager to the client's next hello: how many ends the journal knew of."""
        self.unnamed: set[int] | None = None
        """While the client submits its calls again: those that it has not named yet, of its calls that are open or have
        ended since the manager came back. It is told of no end meanwhile."""
        self.last_call = -1
        """The highest id among its calls."""
        self.open_calls = 0


class Cost:
    """What runs of one function on one context have cost, whoever asked for them and how."""

    __slots__ = ("by_kind", "context", "function", "least_s", "run_s", "runs")

    def __init__(self, function: FunctionBlob, context: Context) -> None:
        self.function = function
        self.context = context
        self.runs = 0
        self.run_s = 0.0
        self.least_s = math.inf
        """The shortest run, as far as runs are told apart: the least mean of those that ended together."""
        self.by_kind: dict[str, list[float]] = {}
        """Number, seconds and items of runs that are not in the performance history yet, by device kind."""


class Group:
    """What calls of one function, context, client and options share."""

    __slots__ = ("client", "context", "cost", "function", "key", "open_calls", "options")

    def __init__(self, key: object, client: Client, cost: Cost, options: CallOptions) -> None:
        self.key = key
        self.client = client
        self.cost = cost
        self.function = cost.function
        self.context = cost.context
        self.options = options
        self.open_calls = 0


class Call(msgspec.Struct, gc=False, eq=False):
    """One invocation of a function, from its acceptance to its end.

    There may be a million of them, so the garbage collector does not walk them: `holder` is the only way into a cycle,
    and it is cleared when the call ends. `ticket` is its queue's (see `queue`).
    """

    id: CallId
    spec: CallSpec
    group: Group
    submitted_at: float
    state: CallState = CallState.WAITING
    holder: Library | Gang | None = None
    sent_at: float = 0.0
    kills: int = 0
    ticket: int = 0
    offered: bool = False
    notes: list[Note] | None = None
    late: bool = False
    """True once it can no longer be in time: its deadline does not count any more."""
    cuts_beside: int = 0
    """How often its library was ended for the sake of another call while it ran there."""
    by_itself: bool = False
    """Whether it is to have a library for itself: it may end others there, or is ended there again and again."""

    def note(self, now: float, text: str) -> None:
        """Remember something for the call's story. Ordinary steps are told from its fields and cost nothing."""
        if self.notes is None:
            self.notes = []
        self.notes.append((now, text))
        if len(self.notes) > KEPT_CALL_NOTES:
            del self.notes[KEPT_CALL_NOTES // 2]


class Gang:
    """The libraries that run one call together. The call ends when every member has ended it; rank 0's end counts."""

    __slots__ = ("address", "ends", "members", "report")

    def __init__(self, members: tuple[Library, ...]) -> None:
        self.members = members
        self.address = ""
        """Where rank 0 awaits the others, once it has said so."""
        self.report: tuple[float, float] | None = None
        """When it said last how many items were done, and how many."""
        self.ends: dict[LibraryId, CallEnd] = {}


class Orphan:
    """A call that a library runs and that the manager has never heard of (see `repair`)."""

    __slots__ = ("end", "library")

    def __init__(self, library: Library) -> None:
        self.library = library
        self.end: CallEnd | None = None
        """How it ended, if it has ended before its client submitted it again."""


class Filling:
    """A library that was given calls one after the other as they arrived, at one moment: they travel in one frame."""

    __slots__ = ("at", "calls", "library")

    def __init__(self, library: Library, at: float, calls: int) -> None:
        self.library = library
        self.at = at
        self.calls = calls


class Context:
    """A recipe and everything that the manager knows of it."""

    __slots__ = (
        "advice", "apart_lacks", "ask_at", "asked_at", "backlogged", "cut_after_s", "cut_loads", "ended", "failed_on",
        "filling", "idle", "last_failure", "libraries", "load_failures", "load_s", "load_total_s", "loads",
        "lost_loads", "paces", "queue", "rate", "recipe", "resident_bytes", "roomy", "run_s", "run_total_s", "runs",
        "served", "starved_since",
    )  # fmt: skip

    def __init__(self, recipe: Recipe, *, by_deadline: bool = False) -> None:
        self.recipe = recipe
        self.queue = Queue(by_deadline=by_deadline)
        self.libraries: dict[LibraryId, Library] = {}
        self.idle: OrderedDict[LibraryId, Library] = OrderedDict()
        """Ready, with a free slot; the hottest is last. Ordered, because plain dicts find their ends in O(n)."""
        self.roomy: OrderedDict[LibraryId, Library] = OrderedDict()
        """Ready, every slot taken, but there is room to prefetch; who was given something last is last."""
        self.backlogged: OrderedDict[LibraryId, Library] = OrderedDict()
        """Ready, and holding more calls than slots."""
        self.filling: Filling | None = None
        """Who was given a call last."""
        self.advice: dict[str, ContextAdvice] = {}
        self.paces = Paces()
        """How long work takes on gangs of each size."""
        self.ask_at = 1
        """Residency is asked again when so many calls wait."""
        self.asked_at = 0.0
        """When it was asked last."""
        self.load_failures = 0
        """Loads that failed since one worked."""
        self.last_failure: Failure | None = None
        self.failed_on: dict[PilotId, int] = {}
        """Loads that failed on each pilot since one worked there."""
        self.cut_loads = 0
        """Loads that were under way when the walltime of their pilots was over, since one worked."""
        self.apart_lacks = False
        """Whether a call that is apart (see `suspects`) can run in none of its libraries."""
        self.lost_loads: list[Pilot] = []
        """Pilots that were lost while they loaded it and did nothing else, since one loaded it."""
        self.cut_after_s = 0.0
        """The longest that such a load had lasted."""
        self.starved_since: float | None = None
        """Since when calls wait and no library of a connected pilot holds the context or loads it."""
        self.loads = 0
        self.load_s = 0.0
        self.load_total_s = 0.0
        self.resident_bytes = 0
        self.ended = 0
        """Its calls that ended, also those that were cancelled before they ran."""
        self.served = 0
        """Calls that its libraries ran to their end; a gang's call counts once for each library."""
        self.rate: Counts = deque()
        """Its calls that ended in each of the last seconds."""
        self.runs = 0
        self.run_s = 0.0
        self.run_total_s = 0.0

    @property
    def lacking(self) -> tuple[int, float, int] | None:
        """Set while the first waiting call lacks libraries that it cannot do without: any at all, or some of its gang.
        The smallest is first in line for devices: by priority, then by how long that has been so."""
        head = self.queue.head()
        if head is None:
            return None
        priority, gang = -head.group.options.priority, head.group.options.gang[0]
        if self.starved_since is not None:
            return priority, self.starved_since, head.id
        if gang > 1 and sum(library.usable for library in self.libraries.values()) < gang:
            return priority, head.submitted_at, head.id
        return None


class Device:
    """One GPU (or CPU allotment) of a pilot. `promised_bytes` is what the manager has given away of its memory."""

    __slots__ = ("facts", "fault", "id", "libraries", "pilot", "promised_bytes", "tier", "tier_since")

    def __init__(self, pilot: Pilot, facts: DeviceFacts, now: float) -> None:
        self.pilot = pilot
        self.facts = facts
        self.id = facts.device
        self.libraries: dict[LibraryId, Library] = {}
        self.promised_bytes = 0
        self.fault = facts.fault
        """Why nothing more is loaded on it; empty while it is well."""
        self.tier = "cold"
        self.tier_since = now

    @property
    def free_bytes(self) -> int:
        """Memory that nobody was promised."""
        return self.facts.memory_bytes - self.promised_bytes


class Library:
    """A process on a pilot that holds one context, or is on its way to."""

    __slots__ = (
        "context", "device_bytes", "devices", "ended_at", "functions", "held", "id", "line", "memory_bytes", "notes",
        "phase", "pilot", "promised_bytes", "ready_at", "resizing", "served", "slots", "started_at", "state", "stuck",
        "suspect", "taking", "used_at", "zombies",
    )  # fmt: skip

    def __init__(
        self, id: LibraryId, context: Context, pilot: Pilot, devices: tuple[Device, ...], promised: int, now: float
    ) -> None:
        self.id = id
        self.context = context
        self.pilot = pilot
        self.devices = devices
        self.promised_bytes = promised
        self.slots = context.recipe.slots
        self.state = LibraryState.LOADING
        self.phase = LibraryPhase.STARTING
        self.line = ""
        """What it has printed last, if it loads for long."""
        self.held: dict[int, Call] = {}
        """Calls sent and not ended, oldest first."""
        self.zombies: dict[int, bool] = {}
        """Calls that were taken away but take a slot here until the pilot says that they are gone, and whether they
        were to be stopped even if they run."""
        self.functions: set[FunctionKey] = set()
        """Functions that it has been sent."""
        self.suspect: Call | None = None
        """A call that runs here by itself, although there are more slots: it may have killed a library before."""
        self.stuck = False
        """Whether its calls run for so long that none is to wait behind them (see `stuck`)."""
        self.taking = 0
        """Calls that it was asked to give back and has not yet."""
        self.resizing: list[int] = []
        """Sizes that it was told to take on and has not answered, oldest first."""
        self.started_at = now
        self.ready_at = now
        self.used_at = now
        self.ended_at = now
        """When a call of it ended, or was taken away, last."""
        self.served = 0
        self.memory_bytes = 0
        self.device_bytes = 0
        self.notes: list[Note] = [(now, f"told to load on {', '.join(d.id for d in devices)}")]

    @property
    def load(self) -> int:
        """Calls that take a slot, or wait here for one."""
        return len(self.held) + len(self.zombies)

    def admits(self, call: Call) -> bool:
        """Whether nothing between the two forbids it to run here now, room and context left aside: it was not taken
        away from here a moment ago, and neither it nor what runs here may have to run by itself."""
        alone = call.by_itself and self.load
        free = self.pilot.reserved is None or self.pilot.reserved is call
        return free and self.suspect is None and not alone and call.id not in self.zombies

    @property
    def usable(self) -> bool:
        """Whether it serves calls, or will: loading or ready on a pilot that is here."""
        return self.state in (LibraryState.LOADING, LibraryState.READY) and self.pilot.state is PilotState.HERE


class Pilot:
    """An agent on a node."""

    __slots__ = (
        "block", "cache_bytes", "devices", "ended", "ends_at", "folder", "hellos_asked", "host", "id", "inbox", "kept",
        "lacks", "lasts_s", "libraries", "loss", "loss_settled", "lost_at", "notes", "pid", "rate", "refused_frames",
        "released", "reserved", "source", "state", "troubles", "unfit", "unfit_times", "used_at", "was",
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
        self.hellos_asked = 0
        """How often it was asked for a newer hello since its last good one. Until then its frames are not taken."""
        self.used_at = now
        """When it came, or its last library that is gone had gone."""
        self.unfit: dict[str, Note] = {}
        """Until when it cannot hold a context, by recipe key, and why (see `fitness`)."""
        self.unfit_times: dict[str, int] = {}
        """How often in a row it was found so, by the same keys."""
        self.source = ""
        """The source of its block, if that is known."""
        self.kept: dict[LibraryId, tuple[Library, int, LibraryState]] | None = None
        """Of one that was given up: libraries that it may come back with, what each was promised, and its state then.
        None: it is not to come back."""
        self.was = PilotState.HERE
        """Of one that was given up: its state before."""
        self.reserved: Call | None = None
        """The call that is to run alone here, or does (see `suspects`)."""
        self.released = False
        """Whether the manager told it to end."""
        self.loss: LossReason | None = None
        """Why it was lost, as far as is known; None: it was not lost (see `losses`)."""
        self.loss_settled = False
        """Whether that will not change any more."""
        self.lost_at = 0.0
        self.lasts_s = 0.0
        """The most that was ever left of its walltime; 0 = no limit."""
        self.ends_at = 0.0
        """When its walltime is over; 0 = never."""
        self.ended = 0
        self.rate: Counts = deque()
        """Calls that it ended in each of the last seconds."""
        self.cache_bytes = 0
        self.refused_frames = 0
        self.troubles: tuple[str, ...] = ()
        """What is wrong with what its batch system granted it."""
        self.lacks = ""
        """What its site asks for and it has not; empty: it is of use."""
        self.notes: list[Note] = [(now, f"joined from {host} (process {pid})")]


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

    def notice(self, text: str) -> None:
        """Keep a sentence for `stoker status`. The same sentence is kept once, with the time of the last time."""
        self.notices.pop(text, None)
        self.notices[text] = self.now
        if len(self.notices) > KEPT_NOTICES:
            del self.notices[next(iter(self.notices))]

    def refuse(self, what: str) -> None:
        """Count something that was refused or ignored."""
        if len(self.refused) >= KEPT_REFUSALS and what not in self.refused:
            what = "of yet another kind"
        self.refused[what] = self.refused.get(what, 0) + 1
