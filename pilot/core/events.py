"""Events that a pilot's shell reports to its core, and the health of devices."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from stoker.pilot.core.turns import EngineOutlook, UnreadPrompt
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, Failure, Printed
from stoker.protocol.ids import CallId, DeviceId, LibraryId, PilotId
from stoker.protocol.to_agent import ToAgent
from stoker.protocol.to_manager import SnapshotHere
from stoker.protocol.to_pilot import RunCalls, ToPilot

# ---- health


class ProbeVerdict(enum.Enum):
    """A probe's answer, by its exit code. Other codes count as FAILED."""

    SOUND = 0
    UNKNOWN = 3  # nothing could be found out
    FAILED = 4  # it refused something, or failed in it; that may pass
    WRONG = 5  # it computed something wrong


class DeviceHealth:
    """The state of one device."""

    def __init__(self) -> None:
        self.known = False  # whether there has been an answer to go by
        self._failed = 0
        self._sound = 0
        self._lasting = False
        self._found = ""  # the fault that probes have found, or the driver has reported
        self._silence = ""  # that the driver does not answer

    @property
    def fault(self) -> str:
        """Why nothing should be loaded on it; empty while there is no reason."""
        return self._found or self._silence

    @property
    def suspected(self) -> bool:
        """Whether it has failed once, and should be probed again at once."""
        return self._failed == 1

    def heard(self, answer: ProbeVerdict, said: str) -> bool:
        """A probe has answered, in these words; whether the fault has changed."""
        before = self.fault
        if answer is ProbeVerdict.UNKNOWN:
            self.known = True
            return False
        if answer is ProbeVerdict.SOUND:
            self.known = True
            self._failed = 0
            self._sound += 1
            if self._sound >= 2 and not self._lasting:
                self._found = ""
            return self.fault != before
        self._sound = 0
        self._failed += 1
        if self._failed < 2:
            return False
        self.known = True
        self._lasting |= answer is ProbeVerdict.WRONG
        self._found = self._found or f"{said}, twice"
        return self.fault != before

    def reported(self, reason: str) -> bool:
        """Its driver has reported a fault. True if it had not before."""
        before = self.fault
        self.known = self._lasting = True
        self._found = self._found or reason
        return self.fault != before

    def silent(self, reason: str) -> bool:
        """Its driver does not answer, for this reason; empty: it answers."""
        before = self.fault
        self.known |= bool(reason)
        self._silence = reason
        return self.fault != before


# ---- events


class _Event(msgspec.Struct, frozen=True, gc=False):
    pass


# ---- the manager


class FromManager(_Event, frozen=True, gc=False):
    """The manager says something."""

    message: ToPilot


class UnacknowledgedFacts(msgspec.Struct):
    """The facts in unacknowledged frames: calls that left libraries, ended and ready libraries."""

    left: dict[int, list[int]] = msgspec.field(default_factory=dict)
    gone: dict[int, list[int]] = msgspec.field(default_factory=dict)
    ready: set[int] = msgspec.field(default_factory=set)


class HelloDue(_Event, frozen=True):
    """A hello is due. `before`: facts of unacknowledged frames; `objects`: names of cached objects."""

    before: UnacknowledgedFacts
    acknowledged: int
    objects: Sequence[str]


class ManagerAway(_Event, frozen=True):
    """There was no connection for `away_s`. `session_over`: why the session is over, as its folder says."""

    away_s: float
    refuses_key: bool = False
    session_over: str = ""


# ---- a library's process


class LibraryPrepared(_Event, frozen=True):
    """Facts of this node for an ordered library. `error`: why it has no folder."""

    library: LibraryId
    free_disk_bytes: int = 0
    changed: str = ""
    snapshots_here: Sequence[str] = ()
    error: str = ""


class ProcessMade(_Event, frozen=True):
    """A library has a process."""

    library: LibraryId
    pid: int


class MemoryShortage(msgspec.Struct, frozen=True):
    """The kernel killed for lack of memory: bytes that are left, and bytes that processes of others hold."""

    room_bytes: int
    others_bytes: int


class ProcessEnded(_Event, frozen=True):
    """A library's process has ended, or could not be made.

    `running` are the calls that it ran, `tail` the last lines of its log. `cause`: what else the shell knows;
    `is_pilots_fault`: this pilot lacks something. `verdict`: the whole failure, where another engine reports it.
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
    printed: Printed | None = None


class FromLibrary(_Event, frozen=True, gc=False):
    """A library says something."""

    library: LibraryId
    messages: Sequence[ToAgent]


class LibraryGarbled(_Event, frozen=True):
    """A library sent bytes that cannot be read or handled."""

    library: LibraryId
    reason: str


class LibraryHungUp(_Event, frozen=True):
    """A library's socket is closed: its process ends, or closed it by mistake."""

    library: LibraryId


class RoomWanted(_Event, frozen=True):
    """Another library needs this one's devices: drain it."""

    library: LibraryId
    reason: str


class Observation(msgspec.Struct, frozen=True):
    """A library's running calls with their seconds, and its host memory if over its limit (else 0)."""

    library: LibraryId
    running: Sequence[tuple[CallId, float]] = ()
    over_limit_bytes: int = 0


class Observed(_Event, frozen=True):
    """Observations of libraries, every `limits.EVERY_S` and after `Observe`."""

    libraries: Sequence[Observation]


class WasStopped(_Event, frozen=True):
    """The pilot's processes were suspended for `seconds`, and run again."""

    seconds: float


class OfferWeighed(_Event, frozen=True):
    """The answer to `WeighOffer`: the work of the engines on a library's devices, and the offered prompt.

    The current step ends at `free_at`. `new` is None if nothing is known. `required_bytes`: what the library needs of
    each device for all its calls; 0 = unknown.
    """

    order: RunCalls
    new: UnreadPrompt | None = None
    engines: Sequence[EngineOutlook] = ()
    free_at: float = 0.0
    required_bytes: int = 0


class UsageMeasured(_Event, frozen=True):
    """A heartbeat is due: usage of libraries and cache, last log lines of slow loads."""

    resident_bytes: Mapping[LibraryId, int]
    cpu_s: Mapping[LibraryId, float]
    cache_bytes: int
    refused_frames: int = 0
    lines: Mapping[LibraryId, str] = {}


# ---- objects


class FetchFailure(msgspec.Struct, frozen=True):
    """Why an object is not here. `in_use_bytes`: bytes that must leave the cache, by waiting library."""

    reason: str
    is_pilots_fault: bool = False
    in_use_bytes: Mapping[LibraryId, int] = {}


class Pinned(_Event, frozen=True):
    """A library's pinned objects, with their paths."""

    library: LibraryId
    paths: Mapping[str, str]
    failed: FetchFailure | None = None


class ObjectArrived(_Event, frozen=True):
    """An object has entered the cache, with its bytes from origin and peers."""

    name: str
    size_bytes: int
    origin_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


class SourceFailed(_Event, frozen=True):
    """A source of an object failed: a pilot (`peer`), or the origin if that is empty."""

    name: str
    reason: str
    peer: PilotId = PilotId("")


class ObjectLost(_Event, frozen=True):
    """An object could not be brought, from anywhere."""

    name: str
    lack: FetchFailure


class CacheListed(_Event, frozen=True):
    """Sizes of all cached objects, by name."""

    sizes: Mapping[str, int]


class ArgumentsBrought(_Event, frozen=True):
    """Paths of large arguments by call, and the calls that lack theirs."""

    library: LibraryId
    ticket: int
    paths: Mapping[CallId, str]
    lacks: Mapping[CallId, FetchFailure]


class HandedIn(_Event, frozen=True):
    """Large results were handed to the session; their ends are final."""

    library: LibraryId
    ends: list[CallEnd]


class SnapshotTaken(_Event, frozen=True):
    """A context's snapshot is in the cache, and other pilots can have it."""

    here: SnapshotHere


# ---- devices


class DevicesMeasured(_Event, frozen=True):
    """Bytes of each device by library, bytes taken in all (-1 = unknown), and the time of the measurement."""

    used: Mapping[LibraryId, Mapping[DeviceId, int]]
    taken: Mapping[DeviceId, int]
    at: Mapping[DeviceId, float]


class Probed(_Event, frozen=True):
    """A probe of a device has answered, in these words."""

    device: DeviceId
    answer: ProbeVerdict
    said: str = ""


class DriverSaid(_Event, frozen=True):
    """A device's driver reported a `fault`, or does not answer (`hangs`)."""

    device: DeviceId
    fault: str = ""
    hangs: str = ""


class DeviceAway(_Event, frozen=True):
    """A device is absent for this reason; empty: it is back."""

    device: DeviceId
    reason: str = ""


# ---- the pilot's job


class WalltimeKnown(_Event, frozen=True):
    """The batch system ends this pilot's job in `left_s` seconds."""

    left_s: float


class Signalled(_Event, frozen=True):
    """The pilot got a signal to end. `again`: a second time."""

    name: str
    again: bool = False


class Unfit(_Event, frozen=True):
    """The pilot lacks what its job gave it: nothing can work here any more."""

    reason: str
    loss: LossReason


class EngineEnded(_Event, frozen=True):
    """The source of the pilot's workers has ended, for this reason."""

    reason: str


class TimerFired(_Event, frozen=True):
    """A time has come that the core asked for."""

    key: str


class Tick(_Event, frozen=True):
    """Some time has passed. `serves_peers`: others get objects from this pilot just now."""

    serves_peers: bool = False


class Farewell(_Event, frozen=True):
    """The pilot ends now. `running`: the calls that each library runs."""

    running: Mapping[LibraryId, tuple[CallId, ...]] = {}


Event = (
    FromManager | HelloDue | ManagerAway | LibraryPrepared | ProcessMade | ProcessEnded | FromLibrary | LibraryGarbled
    | LibraryHungUp | RoomWanted | Observed | WasStopped | OfferWeighed | UsageMeasured | Pinned | ObjectArrived
    | SourceFailed | ObjectLost | CacheListed | ArgumentsBrought | HandedIn | SnapshotTaken | DevicesMeasured | Probed
    | DriverSaid | DeviceAway | WalltimeKnown | Signalled | Unfit | EngineEnded | TimerFired | Tick | Farewell
)  # fmt: skip
