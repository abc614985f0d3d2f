"""Events for a pilot's core, and the health of devices."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from stoker.pilot.core.turns import EngineOutlook, UnreadPrompt
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, Failure, OutputRange
from stoker.protocol.ids import CallId, DeviceId, LibraryId, PilotId
from stoker.protocol.to_agent import ToAgent
from stoker.protocol.to_manager import SnapshotWritten
from stoker.protocol.to_pilot import RunCalls, ToPilot


# ---- health
class ProbeVerdict(enum.Enum):
    """The verdict of a device probe; the value is the probe's exit code. Other exit codes count as FAILED."""

    SOUND = 0
    UNKNOWN = 3  # the probe could not test the device
    FAILED = 4  # the device refused an operation, or an operation failed; the fault may be temporary
    WRONG = 5  # the device computed a wrong result


class DeviceHealth:
    def __init__(self) -> None:
        self.is_known = False  # True after a usable answer of a probe or the driver
        self._failed = 0
        self._sound_probes = 0
        self._is_permanent = False
        self._found_fault = ""  # the fault that a probe found or that the driver reported
        self._silence = ""  # why the driver does not answer; empty if it answers

    @property
    def fault(self) -> str:
        """Why no context should load on the device; empty if the device is sound."""
        return self._found_fault or self._silence

    @property
    def is_suspected(self) -> bool:
        """True if the device has failed one probe and is probed again soon."""
        return self._failed == 1

    def record_verdict(self, answer: ProbeVerdict, said: str) -> bool:
        """Record the answer of a probe. Return True if the fault has changed."""
        before = self.fault
        if answer is ProbeVerdict.SOUND:
            self._failed = 0
            self._sound_probes += 1
            if self._sound_probes >= 2 and not self._is_permanent:
                self._found_fault = ""
        elif answer is not ProbeVerdict.UNKNOWN:
            self._sound_probes = 0
            self._failed += 1
            if self._failed < 2:
                return False
            self._is_permanent |= answer is ProbeVerdict.WRONG
            self._found_fault = self._found_fault or f"{said}, twice"
        self.is_known = True
        return self.fault != before

    def record_driver_fault(self, reason: str) -> bool:
        """Record a fault that the driver reports. Return True if the fault has changed."""
        before = self.fault
        self.is_known = self._is_permanent = True
        self._found_fault = self._found_fault or reason
        return self.fault != before

    def record_silence(self, reason: str) -> bool:
        """Record why the driver does not answer (empty: it answers). Return True if the fault has changed."""
        before = self.fault
        self.is_known |= bool(reason)
        self._silence = reason
        return self.fault != before


# ---- events
class _Event(msgspec.Struct, frozen=True, gc=False):
    pass


# ---- the manager
class FromManager(_Event, frozen=True, gc=False):
    message: ToPilot


class UnacknowledgedFacts(msgspec.Struct):
    """Facts in unacknowledged frames: calls that left a library, ended libraries with calls, and ready libraries."""

    left: dict[int, list[int]] = msgspec.field(default_factory=dict)
    gone: dict[int, list[int]] = msgspec.field(default_factory=dict)
    ready: set[int] = msgspec.field(default_factory=set)


class HelloDue(_Event, frozen=True):
    """The pilot must send a hello. `before`: facts in unacknowledged frames; `objects`: names of cached objects."""

    before: UnacknowledgedFacts
    acknowledged: int
    objects: Sequence[str]


class ManagerAway(_Event, frozen=True):
    """The pilot has had no connection to the manager for `away_s` seconds. `session_over`: why the session has ended,
    if known.
    """

    away_s: float
    refuses_key: bool = False
    session_over: str = ""


# ---- a library's process
class LibraryPrepared(_Event, frozen=True):
    """The attempt to create a library's folder has ended. `error`: why the attempt failed; empty if it succeeded."""

    library: LibraryId
    free_disk_bytes: int = 0
    changed: str = ""
    snapshots_here: Sequence[str] = ()
    error: str = ""


class ProcessMade(_Event, frozen=True):
    library: LibraryId
    pid: int


class MemoryShortage(msgspec.Struct, frozen=True):
    """Host memory after an out-of-memory kill. `room_bytes`: free memory; `others_bytes`: memory of processes outside
    the pilot.
    """

    room_bytes: int
    others_bytes: int


class ProcessEnded(_Event, frozen=True):
    """The process of a library has ended, or could not be created.

    `tail`: the last lines of the library's log; `cause`: why the process ended, if the agent knows; `is_pilots_fault`:
    True if this pilot is the cause; `verdict`: the complete failure, as reported by TaskVine.
    """

    library: LibraryId
    signal: int = 0
    exit_code: int = 0
    running: tuple[CallId, ...] = ()
    tail: str = ""
    cause: str = ""
    is_pilots_fault: bool = False
    verdict: Failure | None = None
    shortage: MemoryShortage | None = None
    printed: OutputRange | None = None


class FromLibrary(_Event, frozen=True, gc=False):
    library: LibraryId
    messages: Sequence[ToAgent]


class LibraryBytesInvalid(_Event, frozen=True):
    library: LibraryId
    reason: str


class LibrarySocketClosed(_Event, frozen=True):
    library: LibraryId


class DevicesWanted(_Event, frozen=True):
    """This library must drain, because another library needs its devices."""

    library: LibraryId
    reason: str


class Observation(msgspec.Struct, frozen=True):
    """Running calls with their run times in seconds. `over_limit_bytes`: host memory of the library if it exceeds the
    limit; else 0.
    """

    library: LibraryId
    running: Sequence[tuple[CallId, float]] = ()
    over_limit_bytes: int = 0


class LibrariesObserved(_Event, frozen=True):
    """Observations of libraries, every `limits.OBSERVATION_INTERVAL_S` seconds and after `ObserveLibrary`."""

    libraries: Sequence[Observation]


class WasSuspended(_Event, frozen=True):
    seconds: float


class OfferInspected(_Event, frozen=True):
    """The engines on a library's devices, and the offered prompt (`new`; None if unknown).

    `free_at`: time at which the current engine step ends; `required_bytes`: bytes needed per device with the offered
    call (0 = unknown); `why_full`: why a cache of fixed size has no room for the call.
    """

    order: RunCalls
    new: UnreadPrompt | None = None
    engines: Sequence[EngineOutlook] = ()
    free_at: float = 0.0
    required_bytes: int = 0
    why_full: str = ""


class UsageMeasured(_Event, frozen=True):
    """The resource use of libraries for a heartbeat that is due, and the last log lines of slow loads."""

    resident_bytes: Mapping[LibraryId, int]
    cpu_s: Mapping[LibraryId, float]
    cache_bytes: int
    refused_frames: int = 0
    lines: Mapping[LibraryId, str] = {}


# ---- objects
class FetchFailure(msgspec.Struct, frozen=True):
    """Why an object is not in the cache. `in_use_bytes`: for each library that needs the object, the pinned bytes that
    other libraries must release first.
    """

    reason: str
    is_pilots_fault: bool = False
    in_use_bytes: Mapping[LibraryId, int] = {}


class ObjectsPinned(_Event, frozen=True):
    library: LibraryId
    paths: Mapping[str, str]
    failed: FetchFailure | None = None


class ObjectArrived(_Event, frozen=True):
    name: str
    size_bytes: int
    origin_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


class SourceFailed(_Event, frozen=True):
    """A source of an object failed: the pilot `peer`, or the origin if `peer` is empty."""

    name: str
    reason: str
    peer: PilotId = PilotId("")


class ObjectLost(_Event, frozen=True):
    """No source could deliver an object."""

    name: str
    lack: FetchFailure


class CacheListed(_Event, frozen=True):
    sizes: Mapping[str, int]


class ArgumentsFetched(_Event, frozen=True):
    library: LibraryId
    ticket: int
    paths: Mapping[CallId, str]
    lacks: Mapping[CallId, FetchFailure]


class ResultsUploaded(_Event, frozen=True):
    """Large results are in the session's folder. `ends`: ends of calls, which refer to the result files."""

    library: LibraryId
    ends: list[CallEnd]


class SnapshotTaken(_Event, frozen=True):
    """The snapshot of a context is in the cache."""

    here: SnapshotWritten


# ---- devices
class DevicesMeasured(_Event, frozen=True):
    """Measured device memory. `used`: bytes per library and device; `taken`: bytes that all processes use on each
    device (-1 = unknown); `at`: time of the measurement.
    """

    used: Mapping[LibraryId, Mapping[DeviceId, int]]
    taken: Mapping[DeviceId, int]
    at: Mapping[DeviceId, float]


class DeviceProbed(_Event, frozen=True):
    device: DeviceId
    answer: ProbeVerdict
    said: str = ""


class DriverReported(_Event, frozen=True):
    device: DeviceId
    fault: str = ""
    hangs: str = ""


class DeviceAway(_Event, frozen=True):
    """A device has become absent, or present again. `reason`: why the device is absent; empty if it is present."""

    device: DeviceId
    reason: str = ""


# ---- the pilot's job
class WalltimeKnown(_Event, frozen=True):
    left_s: float


class SignalReceived(_Event, frozen=True):
    """The pilot received a signal to end. `again`: True for the second signal."""

    name: str
    again: bool = False


class ResourceLost(_Event, frozen=True):
    """The pilot lost a resource of its job, so no library can run on this pilot."""

    reason: str
    loss: LossReason


class TaskVineEnded(_Event, frozen=True):
    reason: str


class TimerFired(_Event, frozen=True):
    key: str


class Tick(_Event, frozen=True):
    """Time has passed. `serves_peers`: True while other pilots fetch objects from this pilot."""

    serves_peers: bool = False


class Farewell(_Event, frozen=True):
    """The pilot exits now."""

    running: Mapping[LibraryId, tuple[CallId, ...]] = {}


Event = (
    FromManager | HelloDue | ManagerAway | LibraryPrepared | ProcessMade | ProcessEnded | FromLibrary
    | LibraryBytesInvalid | LibrarySocketClosed | DevicesWanted | LibrariesObserved | WasSuspended | OfferInspected
    | UsageMeasured | ObjectsPinned | ObjectArrived | SourceFailed | ObjectLost | CacheListed | ArgumentsFetched
    | ResultsUploaded | SnapshotTaken | DevicesMeasured | DeviceProbed | DriverReported | DeviceAway | WalltimeKnown
    | SignalReceived | ResourceLost | TaskVineEnded | TimerFired | Tick | Farewell
)  # fmt: skip
