"""The nouns of the manager: clients, calls, contexts, libraries, pilots, devices, and the queues between them.

Plain slotted objects, changed only by this package. Policies see them through the read-only Protocols of `seams`.
What exists only in one state lives in that state's type: a waiting call has no library, a held one has exactly one
holder (a `Library`, or a `Gang` of them).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator

from stoker.contexts.recipe import Recipe
from stoker.manager.core.events import ContextAdvice
from stoker.manager.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec, Failure
from stoker.manager.protocol.ids import ClientId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.manager.protocol.reliable import Inbox
from stoker.manager.protocol.to_manager import DeviceFacts, LibraryPhase
from stoker.manager.protocol.to_pilot import FunctionBlob


class CallState(enum.Enum):
    """Where a call is."""

    WAITING = "waiting"
    """In its context's queue."""
    HELD = "held"
    """Sent to a library (or a gang of them), which runs it or will."""
    ENDED = "ended"
    """Its one end has been made; the object lingers only for its story."""


class LibraryState(enum.Enum):
    """What a library is doing, as far as the manager knows."""

    LOADING = "loading"
    """Told to start; fetches, starts, loads."""
    READY = "ready"
    """Holds its context and serves calls."""
    STOPPING = "stopping"
    """Told to stop; its memory is still promised until the pilot says that it is gone."""
    GONE = "gone"
    """Ended."""


class PilotState(enum.Enum):
    """What the manager knows of a pilot."""

    HERE = "here"
    """Connected."""
    CUT = "cut"
    """Its connection broke; it may come back with everything it held."""
    DRAINING = "draining"
    """Told to end when its running calls are done; gets nothing new."""
    GONE = "gone"
    """Ended or lost."""


Note = tuple[float, str]
"""When, and what happened."""


class Client:
    """Somebody who submits calls."""

    __slots__ = ("connected", "first_unacked", "gone", "id", "inbox", "number", "observer", "open_calls", "unacked")

    def __init__(self, id: ClientId, *, number: int, observer: bool) -> None:
        self.id = id
        self.number = number
        self.observer = observer
        self.connected = True
        self.gone = False
        self.inbox = Inbox()
        self.unacked: deque[CallEnd] = deque()
        self.first_unacked = 0
        self.open_calls = 0


class Group:
    """What calls of one function, context, client and options share, and what their runs have cost."""

    __slots__ = ("client", "context", "function", "kind_runs", "options", "run_s", "runs")

    def __init__(self, client: Client, function: FunctionBlob, context: Context, options: CallOptions) -> None:
        self.client = client
        self.function = function
        self.context = context
        self.options = options
        self.runs = 0
        self.run_s = 0.0
        self.kind_runs: dict[str, list[float]] = {}


class Call:
    """One invocation of a function, from its acceptance to its end."""

    __slots__ = ("group", "holder", "id", "kills", "notes", "sent_at", "spec", "state", "submitted_at")

    def __init__(self, spec: CallSpec, group: Group, now: float) -> None:
        self.id = spec.call
        self.spec = spec
        self.group = group
        self.state = CallState.WAITING
        self.holder: Library | Gang | None = None
        self.submitted_at = now
        self.sent_at = 0.0
        self.kills = 0
        self.notes: list[Note] | None = None

    def note(self, now: float, text: str) -> None:
        """Remember something for the call's story. Ordinary steps are told from its fields and cost nothing."""
        if self.notes is None:
            self.notes = []
        self.notes.append((now, text))


class Gang:
    """The libraries that run one call together. The call ends when every member has ended it; rank 0's end counts."""

    __slots__ = ("ends", "members")

    def __init__(self, members: tuple[Library, ...]) -> None:
        self.members = members
        self.ends: dict[LibraryId, CallEnd] = {}


class Queue:
    """Waiting calls of one context: by priority, then in order of arrival. All operations are O(1) amortized.

    A call that left the queue another way (cancelled, dropped, sent by a policy) is skipped when its turn comes.
    """

    __slots__ = ("_levels", "_order", "count")

    def __init__(self) -> None:
        self._levels: dict[int, deque[Call]] = {}
        self._order: list[int] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def _level(self, priority: int) -> deque[Call]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = deque()
            self._order = sorted(self._levels, reverse=True)
        return level

    def push(self, call: Call) -> None:
        """Put a call at the end of its priority."""
        self._level(call.group.options.priority).append(call)
        self.count += 1

    def push_front(self, call: Call) -> None:
        """Put a call back at the front of its priority: it has waited before."""
        self._level(call.group.options.priority).appendleft(call)
        self.count += 1

    def extend(self, calls: list[Call]) -> None:
        """Put calls of one priority at its end."""
        self._level(calls[0].group.options.priority).extend(calls)
        self.count += len(calls)

    def left(self) -> None:
        """A waiting call has left the queue without being popped."""
        self.count -= 1

    def head(self) -> Call | None:
        """The call whose turn is next, or None."""
        for priority in self._order:
            level = self._levels[priority]
            while level:
                if level[0].state is CallState.WAITING:
                    return level[0]
                level.popleft()
        return None

    def pop_like(self, group: Group, limit: int) -> list[Call]:
        """Take up to `limit` calls of one group from the head of the queue."""
        level = self._levels[group.options.priority]
        taken: list[Call] = []
        while level and len(taken) < limit:
            call = level[0]
            if call.state is CallState.WAITING:
                if call.group is not group:
                    break
                taken.append(call)
            level.popleft()
        self.count -= len(taken)
        return taken

    def __iter__(self) -> Iterator[Call]:
        for priority in self._order:
            for call in self._levels[priority]:
                if call.state is CallState.WAITING:
                    yield call


class Context:
    """A recipe and everything that the manager knows of it."""

    __slots__ = (
        "advice", "ask_at", "backlogged", "ended", "failed_on", "idle", "last_failure", "libraries", "load_failures",
        "load_s", "load_total_s", "loads", "queue", "recipe", "resident_bytes", "roomy", "run_s", "run_total_s", "runs",
        "starved_since",
    )  # fmt: skip

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.queue = Queue()
        self.libraries: dict[LibraryId, Library] = {}
        self.idle: dict[LibraryId, Library] = {}
        """Ready, with a free slot; the hottest is last."""
        self.roomy: dict[LibraryId, Library] = {}
        """Ready, every slot taken, but there is room to prefetch."""
        self.backlogged: dict[LibraryId, Library] = {}
        """Ready, and holding more calls than slots."""
        self.advice: dict[str, ContextAdvice] = {}
        self.ask_at = 1
        self.load_failures = 0
        self.last_failure: Failure | None = None
        self.failed_on: dict[PilotId, int] = {}
        self.starved_since: float | None = None
        self.loads = 0
        self.load_s = 0.0
        self.load_total_s = 0.0
        self.resident_bytes = 0
        self.ended = 0
        self.runs = 0
        self.run_s = 0.0
        self.run_total_s = 0.0


class Device:
    """One GPU (or CPU allotment) of a pilot. `promised_bytes` is what the manager has given away of its memory."""

    __slots__ = ("facts", "id", "libraries", "pilot", "promised_bytes", "tier", "tier_since")

    def __init__(self, pilot: Pilot, facts: DeviceFacts, now: float) -> None:
        self.pilot = pilot
        self.facts = facts
        self.id = facts.device
        self.libraries: dict[LibraryId, Library] = {}
        self.promised_bytes = 0
        self.tier = "cold"
        self.tier_since = now

    @property
    def free_bytes(self) -> int:
        """Memory that nobody was promised."""
        return self.facts.memory_bytes - self.promised_bytes


class Library:
    """A process on a pilot that holds one context, or is on its way to."""

    __slots__ = (
        "context",
        "device_bytes",
        "devices",
        "functions",
        "held",
        "id",
        "memory_bytes",
        "notes",
        "phase",
        "pilot",
        "promised_bytes",
        "served",
        "slots",
        "started_at",
        "state",
        "used_at",
        "zombies",
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
        self.held: dict[int, Call] = {}
        """Calls sent and not ended, oldest first."""
        self.zombies: set[int] = set()
        """Calls that ended for the client but still take a slot here until the pilot says they are gone."""
        self.functions: set[FunctionKey] = set()
        """Functions that it has been sent."""
        self.started_at = now
        self.used_at = now
        self.served = 0
        self.memory_bytes = 0
        self.device_bytes = 0
        self.notes: list[Note] = [(now, f"told to load on {', '.join(d.id for d in devices)}")]

    @property
    def load(self) -> int:
        """Calls that take a slot, or wait here for one."""
        return len(self.held) + len(self.zombies)


class Pilot:
    """An agent on a node."""

    __slots__ = (
        "block", "cache_bytes", "devices", "ended", "ends_at", "folder", "host", "id", "inbox", "libraries", "notes",
        "pid", "state",
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
        self.ends_at = 0.0
        self.ended = 0
        self.cache_bytes = 0
        self.notes: list[Note] = [(now, f"joined from {host} (process {pid})")]


class Reports:
    """Last progress report of each running call that made one."""

    __slots__ = ("by_call",)

    def __init__(self) -> None:
        self.by_call: dict[int, CallProgress] = {}


class State:
    """Everything. `now` is the time of the event being handled; `View` in `seams` is how policies see it."""

    def __init__(self, session: str, *, now: float = 0.0) -> None:
        self.session = session
        self.started_at = now
        self.now = now
        self.clients: dict[ClientId, Client] = {}
        self.clients_by_number: dict[int, Client] = {}
        self.functions: dict[FunctionKey, FunctionBlob] = {}
        self.groups: dict[object, Group] = {}
        self.contexts: dict[str, Context] = {}
        self.calls: dict[int, Call] = {}
        self.failed: dict[int, Call] = {}
        """The last calls that ended without a result, for their stories."""
        self.pilots: dict[PilotId, Pilot] = {}
        self.libraries: dict[LibraryId, Library] = {}
        self.hungry: dict[str, Context] = {}
        """Contexts with waiting calls."""
        self.reports = Reports()
        self.timers: dict[str, float] = {}
        self.blocks: dict[str, str] = {}
        self.refused: dict[str, int] = {}
        """What was refused or ignored, by kind, counted."""
        self.tier_seconds: dict[str, float] = {"cold": 0.0, "warm": 0.0}
        self.next_library = 1
        self.done = 0
        self.failures = 0
        self.lost_pilots = 0
        self.rerun_calls = 0
        self.rate: deque[tuple[int, int]] = deque()
        """Calls ended in each of the last seconds: (second, calls)."""
        self.ending = ""
        """Why the session ends, once it does."""

    def devices(self) -> Iterator[Device]:
        """Devices of pilots that can be given work."""
        for pilot in self.pilots.values():
            if pilot.state is PilotState.HERE:
                yield from pilot.devices.values()

    def refuse(self, what: str) -> None:
        """Count something that was refused or ignored."""
        self.refused[what] = self.refused.get(what, 0) + 1
