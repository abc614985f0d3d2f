"""The pilot's state. Stages of a library: FETCHING -> (WAITING ->) STARTING -> LOADING -> READY -> (DRAINING ->) GONE.

A ready library may sleep: READY -> SLEEPING -> ASLEEP -> WAKING -> READY. Every stage may change to GONE. A reservation
has the same number of bytes on each device of a library (docs/decisions/050).
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.recipe import ObjectRef
from stoker.contexts.step_times import StepTimes
from stoker.pilot.core.commands import Command, SendToManager, Severity, WriteLog
from stoker.pilot.core.events import DeviceHealth
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import Failure
from stoker.protocol.ids import CallId, DeviceId, LibraryId
from stoker.protocol.to_manager import DeviceFacts, FromPilot, LibraryFacts, SnapshotWritten
from stoker.protocol.to_pilot import FetchObject, RunCalls, StartLibrary
from stoker.units import show_bytes


# ---- stages
class Stage(enum.Enum):
    FETCHING = "fetching"
    WAITING = "waiting"  # the objects are present; the devices lack memory or accept no further process (see `memory`)
    STARTING = "starting"  # the process is being created
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "falling asleep"  # the library waits for host memory, then its context leaves the device
    ASLEEP = "asleep"  # the context is in host memory
    WAKING = "waking"  # the library waits for device memory, then its context returns to the device
    DRAINING = "draining"  # the library finishes its running calls and accepts no further calls
    GONE = "gone"


NEXT_STAGES = {
    Stage.FETCHING: {Stage.WAITING, Stage.STARTING, Stage.GONE},
    Stage.WAITING: {Stage.STARTING, Stage.GONE},
    Stage.STARTING: {Stage.LOADING, Stage.GONE},
    Stage.LOADING: {Stage.READY, Stage.GONE},
    Stage.READY: {Stage.SLEEPING, Stage.DRAINING, Stage.GONE},
    Stage.SLEEPING: {Stage.ASLEEP, Stage.GONE},
    Stage.ASLEEP: {Stage.WAKING, Stage.GONE},
    Stage.WAKING: {Stage.READY, Stage.GONE},
    Stage.DRAINING: {Stage.GONE},
    Stage.GONE: set(),
}
SERVING_STAGES = frozenset({Stage.READY, Stage.DRAINING})  # stages in which the process runs calls
SLEEP_STAGES = frozenset({Stage.SLEEPING, Stage.ASLEEP, Stage.WAKING})
REFUSING_STAGES = SLEEP_STAGES | {Stage.DRAINING}  # stages of a loaded library that accepts no calls


# ---- ledger
HOST = DeviceId("host memory")  # device id that stands for the host memory of sleeping contexts


class Ledger:
    def __init__(self, devices: dict[DeviceId, int]) -> None:
        self.capacity = dict(devices)
        self._reservations: dict[LibraryId, tuple[tuple[DeviceId, ...], int]] = {}
        self._free = dict(devices)
        self.has_freed = False  # True if memory was released since the last `reserve_claimed_memory`

    def explain_impossible_size(self, devices: tuple[DeviceId, ...], memory_bytes: int) -> str:
        """Return why this reservation would not fit on empty devices; empty if it would fit."""
        unknown = [device for device in devices if device not in self.capacity]
        if unknown:
            return f"this pilot has no device {unknown[0]}; it has {', '.join(self.capacity)}"
        if not devices or len(set(devices)) != len(devices):
            return "a library needs one device or several different devices"
        if memory_bytes < 0:
            return f"{memory_bytes} bytes cannot be reserved"
        for device in devices:
            if memory_bytes > self.capacity[device]:
                return f"{device} has {show_bytes(self.capacity[device])} in all, {show_bytes(memory_bytes)} are needed"
        return ""

    def explain_shortage(self, devices: tuple[DeviceId, ...], memory_bytes: int) -> str:
        """Return why this reservation does not fit now; empty if it fits."""
        if never := self.explain_impossible_size(devices, memory_bytes):
            return never
        for device in devices:
            if memory_bytes > self._free[device]:
                free = f"{show_bytes(self._free[device])} of {show_bytes(self.capacity[device])} free"
                return f"{device} has {free}, {show_bytes(memory_bytes)} are needed"
        return ""

    def reserve(self, library: LibraryId, *, devices: tuple[DeviceId, ...], memory_bytes: int) -> None:
        """Reserve `memory_bytes` on each device. Raises ValueError if the memory is not free."""
        again = f"library {library} already has a reservation" if library in self._reservations else ""
        if reason := again or self.explain_shortage(devices, memory_bytes):
            raise ValueError(reason)
        for device in devices:
            self._free[device] -= memory_bytes
        self._reservations[library] = (devices, memory_bytes)

    def resize(self, library: LibraryId, *, memory_bytes: int) -> None:
        """Change a library's reservation on each device. If the memory is not free, raises ValueError and changes
        nothing.
        """
        if library not in self._reservations:
            raise ValueError(f"library {library} has no reservation")
        devices, before = self._reservations[library]
        reason = (
            self.explain_shortage(devices, max(0, memory_bytes - before)) if memory_bytes >= 0 else "a negative size"
        )
        if reason:
            raise ValueError(reason)
        for device in devices:
            self._free[device] -= memory_bytes - before
        self.has_freed |= memory_bytes < before
        self._reservations[library] = (devices, memory_bytes)

    def release(self, library: LibraryId) -> None:
        devices, memory_bytes = self._reservations.pop(library, ((), 0))
        self.has_freed = True
        for device in devices:
            self._free[device] += memory_bytes

    def free_bytes(self, device: DeviceId) -> int:
        return self._free[device]

    def reserved_bytes(self, library: LibraryId) -> int:
        return self._reservations.get(library, ((), 0))[1]

    def validate(self) -> None:
        """Raise ValueError if reserved and free bytes do not add up to the capacity (for tests and the simulator)."""
        for device, capacity in self.capacity.items():
            held = sum(size for devices, size in self._reservations.values() if device in devices)
            if held + self._free[device] != capacity or self._free[device] < 0:
                raise ValueError(f"{device}: {held} held and {self._free[device]} free of {capacity}")


# ---- timers
NEVER = float("inf")


class Timers:
    """Timers by key. A new timer replaces an older timer with the same key."""

    def __init__(self) -> None:
        self._timers: dict[str, float] = {}

    def set_timer(self, at: float, key: str) -> None:
        self._timers[key] = at

    def take_due(self, now: float) -> list[str]:
        due = sorted((at, key) for key, at in self._timers.items() if at <= now)
        for _, key in due:
            del self._timers[key]
        return [key for _, key in due]

    @property
    def next_due_at(self) -> float:
        """Time when the next timer is due; infinity if no timer is set."""
        return min(self._timers.values(), default=NEVER)


# ---- state
_MOST_STOPS = 10_000  # about the number of suspensions in a week, if Slurm alternates two jobs every 30 s


class PilotFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Constant facts of a pilot. `address`: address of the machine, for other pilots; `peer`: address of the transfer
    server; `folder`: log folder, for users; `is_carried`: True if the pilot does not see the session's folder, so the
    seed transfers large payloads; `sleeper_bytes`: host memory for sleeping contexts of GPUs.
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
    sleeper_bytes: int = 0
    exit_grace_s: float = 2.0  # seconds that running calls may continue when the pilot exits
    probed: frozenset[DeviceId] = frozenset()
    probe_every_s: float = 300.0  # seconds between two probes of a device without libraries; 0 = never
    node: str = ""  # the node's name in the batch system; empty if unknown


class EndCause(msgspec.Struct, frozen=True):
    """Reason why the pilot ends a library. `printed`: True if the reported failure should include the last log
    lines.
    """

    failure: Failure
    printed: bool = False


class StoppingCall(msgspec.Struct, frozen=True):
    """A running call that the pilot has asked to stop. `failure`: the failure to report as the call's end; None if the
    manager cancelled the call.
    """

    until: float
    failure: Failure | None = None


class PilotLibrary:
    """A library of this pilot, from the order to start it until the report of its end."""

    def __init__(self, ordered: StartLibrary, now: float) -> None:
        self.ordered = ordered
        self.number = ordered.library
        self.recipe = ordered.recipe
        self.devices = ordered.devices
        self.stage = Stage.FETCHING
        self.held_calls: dict[CallId, float] = {}  # calls in order of arrival, with time limits in seconds (0 = none)
        self.postponed_orders: list[RunCalls] = []  # orders to run calls, kept until the library is ready
        self.piece_windows: dict[CallId, PieceWindow] = {}
        self.served = 0
        self.has_limits = False

        self.ordered_at = now
        self.fetched_at = 0.0  # when all objects were fetched and the wait for device memory began
        self.started_at = 0.0
        self.hello_at = 0.0
        self.ready_at = 0.0
        self.pid = 0
        self.has_process = False  # True if the process exists or is being created

        self.missing_objects: set[str] = set()  # names of objects that the library waits for
        self.has_pins = False
        self.paths: dict[str, str] = {}  # paths of objects, by cache name
        self.snapshot_forms: dict[str, str] = {}  # form (digest of source and dtype) of each snapshot, by cache name
        self.awaits_snapshots = False
        self.arguments: dict[CallId, str] = {}  # paths of large arguments, by call
        self.orders_waiting_for_arguments: dict[int, RunCalls] = {}  # by ticket number

        self.end_cause: EndCause | None = None
        self.must_end = False
        self.invalid_bytes_reason = ""  # reason why the library's socket is no longer read, after an invalid message
        self.socket_closed_at = 0.0  # when the socket closed while the process was alive
        self.cache_lacks_bytes = 0  # cache bytes that other libraries use and must release before this one can start

        self.is_killed = False  # True once the pilot has ordered the kill of the process
        self.stopping_calls: dict[CallId, StoppingCall] = {}
        self.stuck_calls: set[CallId] = set()  # calls that did not stop within the grace period
        self.stuck_at = 0.0  # when a call was first found stuck; 0 = none
        self.give_back_sent_at = 0.0  # when the oldest unanswered `GiveBack` was sent; 0 = all are answered
        self.give_back_orders = 0  # number of `GiveBack` orders sent
        self.last_void_give_back = 0  # answers to `GiveBack` orders up to this number are ignored
        self.idle_observations = 0  # number of consecutive observations without a running call or a message
        self.unconfirmed_sizes: list[int] = []  # ordered bytes per device that await an answer, oldest first

        self.sleeps = False  # True if the context can sleep
        self.awake_bytes = 0  # reservation on each device before sleep, in bytes
        self.asleep_bytes = 0  # bytes on each device that the library should keep during sleep
        self.asleep_at = 0.0
        self.wake_bytes = -1  # bytes to reserve for a wake right after the library has fallen asleep; -1 = no wake
        self.sleep_or_wake_ordered_at = 0.0  # when the order to sleep or wake was sent; 0 = no open order

        self.slots = 0  # number of slots that the library reported; 0 = not ready yet, or the recipe's number
        self.cache: TokenCache | None = None  # sizes of weights and token cache that the library reported
        self.resident_bytes = 0
        self.device_bytes = 0  # library's measured bytes on the GPU where it uses most; 0 = unknown
        self.has_measured_size = False  # True once the device reservation is based on a measurement or an order
        self.exceeds_device_memory = False  # True if the library uses more of a device than the pilot could reserve
        self.last_line = ""

    @property
    def is_serving(self) -> bool:
        return self.stage in SERVING_STAGES

    @property
    def is_loaded(self) -> bool:
        """True if the context is loaded, on a device or asleep in host memory."""
        return self.stage in SERVING_STAGES or self.stage in SLEEP_STAGES


@dataclass
class PieceWindow:
    """The pieces (yielded results) of one call that the client has not acknowledged."""

    run: int = -1  # run that yielded the pieces; -1 = no piece yet
    first: int = 0  # number of the oldest kept piece
    items: deque[bytes] = field(default_factory=deque)


@dataclass
class WantedObject:
    """An object that libraries wait for."""

    ref: ObjectRef
    is_begun: bool = True  # False while the pilot searches its cache for an object whose fetch the manager has planned
    libraries: dict[LibraryId, None] = field(default_factory=dict)
    order: FetchObject | None = None  # the manager's last order to fetch the object, with its sources
    trouble: str = ""  # why this pilot could not read the object's origin; empty without an error


@dataclass
class DeviceProbing:
    health: DeviceHealth = field(default_factory=DeviceHealth)
    due_at: float = 0.0
    is_under_way: bool = False
    is_urgent: bool = False  # True after a call failed: probe the device even if a library uses it


class CoreState:
    """The pilot's state, and the commands that the current event has produced."""

    def __init__(self, facts: PilotFacts) -> None:
        self.facts = facts
        self.now = 0.0
        self.commands: list[Command] = []
        self.devices: Mapping[DeviceId, DeviceFacts] = {device.device: device for device in facts.devices}
        self.ledger = Ledger({device.device: device.memory_bytes for device in facts.devices})
        self.libraries: dict[LibraryId, PilotLibrary] = {}
        self.claims: dict[LibraryId, int] = {}  # bytes per device that libraries need to start, wake or grow
        self.host_memory = Ledger({HOST: facts.sleeper_bytes})
        self.host_claims: dict[LibraryId, int] = {}  # bytes of host memory that libraries need to fall asleep
        self.ended_libraries: OrderedDict[LibraryId, LibraryFacts] = OrderedDict()
        self.last_library = 0  # highest library number in the received orders
        self.last_ticket = 0  # latest ticket; a ticket identifies an order whose arguments are fetched
        self.suspensions: deque[tuple[float, float]] = deque(maxlen=_MOST_STOPS)  # start and end of each suspension
        self.uploads_pending = 0

        self.wants: dict[str, WantedObject] = {}
        self.reported_objects: set[str] = set()  # objects that the manager counts as cached on this pilot
        self.offered_forms: set[str] = set()  # forms (digests) of the snapshots offered to other pilots
        self.reported_snapshots: list[SnapshotWritten] = []

        self.step_times: dict[tuple[str, str], StepTimes] = {}  # by recipe key and kind of device

        self.device_probings = {device: DeviceProbing() for device in facts.probed}
        self.faults: dict[DeviceId, str] = {device.device: device.fault for device in facts.devices if device.fault}

        self.hellos = 0
        self.answered_hello = 0  # number of the last hello that the manager answered
        self.hello_is_due = False
        self.hello_sent_at = 0.0
        self.welcomed_at = 0.0
        self.heartbeat_s = 5.0
        self.heartbeat_at = 0.0  # when the next heartbeat is due
        self.lease_s = 60.0

        self.ends_at = NEVER
        self.drain_at = NEVER  # when the pilot begins to drain before the end of the job
        self.leaving = ""  # why the pilot exits; empty while it stays
        self.loss: LossReason | None = None  # why the pilot exits early without an order from the manager
        self.leave_by = NEVER
        self.says_farewell = True  # False if the manager refused the pilot
        self.has_ended = False  # True once the pilot reported its end; after that, the pilot ignores orders
        self.exit_code = 0
        self.is_unfit = False  # True if the pilot lost a resource of its job; this loss then explains all failures
        self.hands_on_until = 0.0  # time until which a leaving pilot serves objects that no other pilot has
        self.serves_until = 0.0  # time until which a leaving pilot continues transfers; 0 = not set yet

    @property
    def awaits_welcome(self) -> bool:
        return self.answered_hello != self.hellos

    def tell_manager(self, message: FromPilot) -> None:
        """Send a message to the manager, and resend it until acknowledged."""
        self.commands.append(SendToManager(message))

    def write_log(self, text: str, severity: Severity = Severity.INFO) -> None:
        self.commands.append(WriteLog(text, severity))

    def devices_of(self, library: PilotLibrary) -> tuple[DeviceFacts, ...]:
        return tuple(self.devices[device] for device in library.devices)

    def log_path(self, number: int) -> str:
        return f"{self.facts.logs}/lib-{number}.log"
