"""The pilot's state, and the file that writes each part.

calls of a library, pieces of results, waiting arguments                  running
its stage, how it ends, calls told to stop, whether the pilot leaves     lifecycle
objects that are wanted, and what the manager was told of them           objects
claims on device memory, and memory that is reserved                     memory (and limits, as measured)
faults of devices                                                        probes
step times of engines                                                    starting

Stages of a library: FETCHING -> (WAITING ->) STARTING -> LOADING -> READY -> (DRAINING ->) GONE. Any stage may go to
GONE. A reservation is the same number of bytes on each device of a library (docs/decisions/050).
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.contexts.step_times import StepTimes
from stoker.pilot.core.commands import Command, Severity, Tell, WriteLog
from stoker.pilot.core.events import DeviceHealth
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import Failure
from stoker.protocol.ids import CallId, DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts, FromPilot, LibraryFacts, SnapshotHere
from stoker.protocol.to_pilot import FetchObject, RunCalls, StartLibrary
from stoker.units import show_bytes

# ---- stages


class Stage(enum.Enum):
    """Where a library is between its order and its end."""

    FETCHING = "fetching"  # its folder is made, and its objects are on their way to the cache
    WAITING = "waiting"
    """Its files are here, and memory or a place on its devices is not free yet (`stoker.pilot.core.memory`)."""
    STARTING = "starting"  # its process is being made
    LOADING = "loading"  # its loader runs
    READY = "ready"  # it holds its context and serves calls
    DRAINING = "draining"  # it finishes what it runs and takes nothing new
    GONE = "gone"  # its process has ended


NEXT = {
    Stage.FETCHING: {Stage.WAITING, Stage.STARTING, Stage.GONE},
    Stage.WAITING: {Stage.STARTING, Stage.GONE},
    Stage.STARTING: {Stage.LOADING, Stage.GONE},
    Stage.LOADING: {Stage.READY, Stage.GONE},
    Stage.READY: {Stage.DRAINING, Stage.GONE},
    Stage.DRAINING: {Stage.GONE},
    Stage.GONE: set(),
}
"""The one table of transitions."""
TAKES_CALLS = frozenset({Stage.FETCHING, Stage.WAITING, Stage.STARTING, Stage.LOADING, Stage.READY})
"""Stages in which a library may be given calls; before READY it holds them."""
SERVES = frozenset({Stage.READY, Stage.DRAINING})  # stages in which its process runs calls


# ---- ledger


class Ledger:
    """Reservations of libraries on devices, in bytes. Nothing is ever held twice or below zero."""

    def __init__(self, devices: dict[DeviceId, int]) -> None:
        self.capacity = dict(devices)
        self._held: dict[LibraryId, tuple[tuple[DeviceId, ...], int]] = {}
        self._free = dict(devices)
        self.has_freed = False  # whether something was given back since the station looked last

    def why_never(self, devices: tuple[DeviceId, ...], memory_bytes: int) -> str:
        """Why this reservation could not be made if nothing else were held, in words; empty when it could."""
        unknown = [device for device in devices if device not in self.capacity]
        if unknown:
            return f"this pilot has no device {unknown[0]}; it has {', '.join(self.capacity)}"
        if not devices or len(set(devices)) != len(devices):
            return "a library needs one device or several different ones"
        if memory_bytes < 0:
            return f"{memory_bytes} bytes cannot be reserved"
        for device in devices:
            if memory_bytes > self.capacity[device]:
                capacity = show_bytes(self.capacity[device])
                return f"{device} has {capacity} in all, {show_bytes(memory_bytes)} are needed"
        return ""

    def why_not(self, devices: tuple[DeviceId, ...], memory_bytes: int) -> str:
        """Why this reservation cannot be made now, in words; empty when it can."""
        never = self.why_never(devices, memory_bytes)
        if never:
            return never
        for device in devices:
            if memory_bytes > self._free[device]:
                free, capacity = self._free[device], self.capacity[device]
                needed = show_bytes(memory_bytes)
                return f"{device} has {show_bytes(free)} of {show_bytes(capacity)} free, {needed} are needed"
        return ""

    def reserve(self, library: LibraryId, *, devices: tuple[DeviceId, ...], memory_bytes: int) -> None:
        """Hold `memory_bytes` on each of `devices`. Raises ValueError, and holds nothing, where it does not fit."""
        again = f"library {library} already holds memory" if library in self._held else ""
        reason = again or self.why_not(devices, memory_bytes)
        if reason:
            raise ValueError(reason)
        for device in devices:
            self._free[device] -= memory_bytes
        self._held[library] = (devices, memory_bytes)

    def resize(self, library: LibraryId, *, memory_bytes: int) -> None:
        """Change what a library holds on each of its devices. Raises ValueError, and changes nothing."""
        if library not in self._held:
            raise ValueError(f"library {library} holds nothing here")
        devices, before = self._held[library]
        reason = self.why_not(devices, max(0, memory_bytes - before)) if memory_bytes >= 0 else "a negative size"
        if reason:
            raise ValueError(reason)
        for device in devices:
            self._free[device] -= memory_bytes - before
        self.has_freed |= memory_bytes < before
        self._held[library] = (devices, memory_bytes)

    def release(self, library: LibraryId) -> None:
        """Hold nothing for this library any more; one that holds nothing is fine."""
        devices, memory_bytes = self._held.pop(library, ((), 0))
        self.has_freed = True
        for device in devices:
            self._free[device] += memory_bytes

    def free(self, device: DeviceId) -> int:
        return self._free[device]

    def held(self, library: LibraryId) -> int:
        """Bytes that a library holds on each of its devices."""
        return self._held.get(library, ((), 0))[1]

    def validate(self) -> None:
        """Raise ValueError if the sums do not add up: for tests and the simulator."""
        for device, capacity in self.capacity.items():
            held = sum(size for devices, size in self._held.values() if device in devices)
            if held + self._free[device] != capacity or self._free[device] < 0:
                raise ValueError(f"{device}: {held} held and {self._free[device]} free of {capacity}")


# ---- timers


class Timers:
    """Timers by their keys: a later one of the same key replaces the earlier."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, str]] = []

    def set(self, at: float, key: str) -> None:
        """Have a timer fire at this time."""
        self._timers = [(due, other) for due, other in self._timers if other != key]
        heapq.heapify(self._timers)
        heapq.heappush(self._timers, (at, key))

    def due(self, now: float) -> list[str]:
        """The keys of timers whose time has come; each once."""
        keys = []
        while self._timers and self._timers[0][0] <= now:
            keys.append(heapq.heappop(self._timers)[1])
        return keys

    @property
    def next_at(self) -> float:
        """When the next timer is due; infinite without timers."""
        return self._timers[0][0] if self._timers else float("inf")


# ---- state

NEVER = float("inf")
_MOST_STOPS = 10_000  # Slurm stops a job this often in a week when it takes turns of half a minute with another job


class PilotFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a pilot that never change.

    `address`: where other pilots reach its machine; `peer`: where it serves objects; `cache`: identity of its object
    cache; `folder`: its logs, for people; `is_carried`: it does not see the session's folder, so payloads travel.
    """

    pilot: str
    session: str
    host: str
    pid: int
    devices: tuple[DeviceFacts, ...]
    block: str = ""
    troubles: tuple[str, ...] = ()
    lacks: str = ""
    address: str = "127.0.0.1"
    peer: str = ""
    cache: str = ""
    cache_bound_bytes: int = 0
    logs: str = ""
    folder: str = ""
    objects: str = ""
    is_carried: bool = False
    lease_s: float = 60.0
    grace_s: float = 2.0
    probed: frozenset[DeviceId] = frozenset()
    probe_every_s: float = 300.0  # how often a device on which nothing is loaded is probed again; 0 = never


class Cause(msgspec.Struct, frozen=True):
    """Why the pilot ends a library; `printed`: the last lines of its log go along when it has ended."""

    failure: Failure
    printed: bool = False


class StoppingCall(msgspec.Struct, frozen=True):
    """A running call that was told to stop, and its end if it returns no result (None if it has ended already)."""

    until: float
    failure: Failure | None = None


class PilotLibrary:
    """One library, from its order until its end has been told."""

    def __init__(self, ordered: StartLibrary, now: float) -> None:
        self.ordered = ordered
        self.number = ordered.library
        self.recipe = ordered.recipe
        self.devices = ordered.devices
        self.stage = Stage.FETCHING
        self.held: dict[CallId, float] = {}
        """Calls in it, in the order in which they came, each with its time limit in seconds (0 = none)."""
        self.waiting: list[RunCalls] = []  # orders that wait until it is ready, or until their arguments are here
        self.streams: dict[CallId, PieceWindow] = {}  # calls that give their results in pieces
        self.served = 0
        self.has_limits = False

        self.ordered_at = now
        self.fetched_at = 0.0  # when all its files were here; from then on it waits for room on its devices
        self.started_at = 0.0
        self.hello_at = 0.0
        self.ready_at = 0.0
        self.pid = 0
        self.has_process = False  # whether there is a process, or one is being made

        self.missing: set[str] = set()  # objects that it waits for
        self.has_pins = False  # whether any of its objects is kept in the cache for it
        self.paths: dict[str, str] = {}  # where its objects lie here, by cache name
        self.forms: dict[str, str] = {}
        """Snapshots of its context that it waits for or has, by cache name: which form each is."""
        self.awaits_forms = False
        self.arguments: dict[CallId, str] = {}  # where large arguments of its calls lie, that had to be brought here
        self.orders_waiting_for_arguments: dict[int, RunCalls] = {}
        """Orders whose arguments are being brought, by ticket."""

        self.cause: Cause | None = None
        self.told_to_end = False
        self.garbled = ""  # why nothing more is read from its socket, once something came there that is no message
        self.hung_up_at = 0.0  # when its socket closed, while its process lives on
        self.cache_lacks_bytes = 0
        """Bytes that other libraries use in the cache and that must go, so that its objects fit."""

        self.is_killed = False  # true once the pilot has ordered the kill of its process
        self.stopping: dict[CallId, StoppingCall] = {}  # calls that were told to stop
        self.stuck: set[CallId] = set()  # calls that were told to stop and did not react in time
        self.stuck_at = 0.0  # when the grace of the first of them ended; 0 without any
        self.asked_back_at = 0.0  # since when it owes an answer to an order to give calls back; 0 = it owes none
        self.orders_back = 0  # how many orders to give calls back it was sent
        self.void_order = 0  # answers to orders up to this one are ignored
        self.times_idle = 0
        """How often in a row it was observed with calls of which it had begun none, and heard of with nothing."""
        self.resizes: list[int] = []
        """Resizes that it has not answered: bytes of each device that each leaves it."""

        self.slots = 0  # how many calls it runs at once, as it has said; 0: as its recipe says, or it is not ready
        self.resident_bytes = 0
        self.device_bytes = 0  # measured bytes on the fullest of its GPUs; 0 = not known
        self.is_settled = False  # whether its reservation of device memory rests on a measurement
        self.is_over = False  # whether it uses more of a device than could be reserved for it
        self.last_line = ""  # the last line of its log that was reported while it loaded

    @property
    def serves(self) -> bool:
        """Whether its process runs calls."""
        return self.stage in SERVES

    @property
    def retires(self) -> bool:
        """Whether it has served as many calls as its recipe allows a library."""
        return 0 < self.recipe.calls_per_library <= self.served


class PieceWindow:
    """The pieces of one call that its client has not acknowledged."""

    def __init__(self) -> None:
        self.run = -1  # the number of its run; -1 = it has yielded nothing
        self.first = 0  # the number of the first piece that is kept
        self.items: deque[bytes] = deque()

    def begin(self, run: int) -> None:
        """The call has begun to run, perhaps not for the first time."""
        self.run, self.first = run, 0
        self.items.clear()

    def take(self, upto: int) -> bool:
        """The client has the first `upto` pieces of this run: they are not kept. False if that is known."""
        upto = min(upto, self.first + len(self.items))
        if upto <= self.first:
            return False
        while self.first < upto:
            self.items.popleft()
            self.first += 1
        return True


class Want:
    """An object that some libraries wait for, on its way or without a known source."""

    def __init__(self, ref: ObjectRef) -> None:
        self.ref = ref
        self.libraries: dict[LibraryId, None] = {}
        self.is_begun = True
        """False for an object whose sources the manager names unasked, until the cache turns out to lack it."""
        self.order: FetchObject | None = None  # the manager's last message about its sources
        self.trouble = ""  # why its origin could not be read here; empty if it could


class DeviceTurn:
    """When a device is probed next, and its health."""

    def __init__(self) -> None:
        self.health = DeviceHealth()
        self.due_at = 0.0
        self.is_under_way = False
        self.is_urgent = False  # whether it has failed in a call, and is probed even in use


class CoreState:
    """The state of one pilot, and the out-tray of the event that is being handled."""

    def __init__(self, facts: PilotFacts) -> None:
        self.facts = facts
        self.now = 0.0
        self.out: list[Command] = []
        self.devices: Mapping[DeviceId, DeviceFacts] = {device.device: device for device in facts.devices}
        self.ledger = Ledger({device.device: device.memory_bytes for device in facts.devices})
        self.libraries: dict[LibraryId, PilotLibrary] = {}
        self.claims: dict[LibraryId, int] = {}
        """Bytes of each device that libraries wait for, to start or to grow."""
        self.gone: OrderedDict[LibraryId, LibraryFacts] = OrderedDict()
        """Facts of ended libraries, until the manager surely knows."""
        self.last_library = 0  # the highest number of a library that it was told to start
        self.last_ticket = 0  # the number of the last order whose arguments it had brought
        self.stops: deque[tuple[float, float]] = deque(maxlen=_MOST_STOPS)
        """When the pilot's processes were stopped, and when they ran again, by the clock of `now`."""
        self.handing_in = 0  # large results that are on their way to the session

        self.wants: dict[str, Want] = {}
        self.told: set[str] = set()  # objects that the manager believes to be here
        self.snapshots: set[str] = set()  # forms of contexts that were offered
        self.told_snapshots: list[SnapshotHere] = []

        self.step_times: dict[tuple[str, str], StepTimes] = {}
        """Step times of engines, by the recipe's key and the kind of device."""

        self.turns = {device: DeviceTurn() for device in facts.probed}
        self.faults: dict[DeviceId, str] = {device.device: device.fault for device in facts.devices if device.fault}
        """Devices that have failed, and why."""

        self.hellos = 0
        self.answered = 0  # the number of the last hello that the manager has answered
        self.hello_is_due = False  # whether the manager has asked for a hello since the last one
        self.greeted_at = 0.0
        self.welcomed_at = 0.0
        self.heartbeat_s = 5.0
        self.heartbeat_at = 0.0  # when the next heartbeat is due
        self.lease_s = facts.lease_s

        self.ends_at = NEVER
        self.drain_at = NEVER  # when the pilot begins to leave before the job ends
        self.leaving = ""  # why the pilot ends; empty while it does not
        self.loss: LossReason | None = None
        """Why it ends although neither the manager nor its walltime wants it; None while they do, or it stays."""
        self.leave_by = NEVER
        self.says_farewell = True  # False if the manager refused the pilot
        self.has_ended = False  # whether the end was told: orders count for nothing from then on
        self.exit_code = 0
        self.is_unfit = False
        """True if it lacks something that its job gave it: failures here are no fault of contexts and calls."""
        self.hands_on_until = 0.0
        """Others get what only this pilot has: until then it stays, unless the manager says that they have it."""
        self.serves_until = 0.0
        """Until then it stays for current transfers; 0 = there were none since it leaves."""

    @property
    def awaits_welcome(self) -> bool:
        """Whether the manager has not answered the last hello."""
        return self.answered != self.hellos

    def tell(self, message: FromPilot) -> None:
        """Say something to the manager that must arrive."""
        self.out.append(Tell(message))

    def log(self, text: str, severity: Severity = Severity.INFO) -> None:
        """Write a line to the pilot's log."""
        self.out.append(WriteLog(text, severity))

    def devices_of(self, library: PilotLibrary) -> tuple[DeviceFacts, ...]:
        return tuple(self.devices[device] for device in library.devices)

    def log_of(self, number: int) -> str:
        """The path of a library's log."""
        return f"{self.facts.logs}/lib-{number}.log"
