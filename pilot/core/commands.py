"""Commands of the pilot's core, carried out in order after the event that caused them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, DeviceId, LibraryId, RecipeKey
from stoker.protocol.to_agent import SnapshotMade
from stoker.protocol.to_library import ToLibrary
from stoker.protocol.to_manager import CallYielded, FromPilot, Heartbeat, PilotHello
from stoker.protocol.to_pilot import FetchObject, RunCalls, StartLibrary


class _Command(msgspec.Struct, frozen=True, gc=False):
    pass


# ---- say


class Tell(_Command, frozen=True, gc=False):
    """Send the manager a message that must arrive."""

    message: FromPilot


class Beat(_Command, frozen=True):
    """Send a heartbeat if connected; it may be lost."""

    message: Heartbeat


class PassOn(_Command, frozen=True, gc=False):
    """Send pieces of results, without a frame number, after this event; drop them if not connected."""

    message: CallYielded


class Greet(_Command, frozen=True):
    """Send a hello, then resend all unacknowledged frames."""

    hello: PilotHello


class Acknowledged(_Command, frozen=True):
    """Drop kept frames up to this number: they were acknowledged."""

    sequence: int


class TellLibrary(_Command, frozen=True, gc=False):
    library: LibraryId
    message: ToLibrary


# ---- processes


class Prepare(_Command, frozen=True):
    """Make a library's folder; answered with `LibraryPrepared`."""

    ordered: StartLibrary


class StartProcess(_Command, frozen=True):
    """Start a library's process, which loads its context from these paths (by cache name or form)."""

    ordered: StartLibrary
    objects: Mapping[str, str]
    device_memory_bytes: int = 0


class KillProcess(_Command, frozen=True):
    """Kill a library's process; answered with `ProcessEnded`."""

    library: LibraryId


class KillZygote(_Command, frozen=True):
    """Kill the zygote that should fork this library and hangs in an import."""

    library: LibraryId


class Forget(_Command, frozen=True):
    """Close a library's socket, release its objects, remove its folder and partial results."""

    library: LibraryId
    ran: Sequence[CallId]


class Observe(_Command, frozen=True):
    """Read a library's running calls and memory now; answered with `Observed`."""

    library: LibraryId


class WeighOffer(_Command, frozen=True):
    """Examine the engines on a library's devices; answered with `OfferWeighed`."""

    order: RunCalls


# ---- objects


class PinObjects(_Command, frozen=True):
    """Pin these objects if cached; answered with `Pinned`."""

    library: LibraryId
    objects: Sequence[ObjectRef]


class Expect(_Command, frozen=True):
    """Serve the parts of an object that is being fetched to peers."""

    name: str


class StartFetch(_Command, frozen=True):
    """Fetch an object from the order's sources, which replace earlier sources."""

    order: FetchObject


class StopFetch(_Command, frozen=True):
    name: str


class TidySnapshots(_Command, frozen=True):
    """Remove snapshots that were made from evicted objects."""


class BringArguments(_Command, frozen=True):
    """Bring large arguments of calls from the session; answered with `ArgumentsBrought`."""

    library: LibraryId
    ticket: int
    wanted: Sequence[tuple[CallId, ObjectRef]]


class ReleaseArguments(_Command, frozen=True):
    library: LibraryId
    calls: Sequence[CallId]


class UploadResults(_Command, frozen=True):
    """Write large results to the session's folder; answered with `ResultsUploaded`."""

    library: LibraryId
    ends: list[CallEnd]


class OfferSnapshot(_Command, frozen=True):
    """Put a context's snapshot into the cache; answered with `SnapshotTaken`."""

    recipe: RecipeKey
    made: SnapshotMade


# ---- the rest


class Probe(_Command, frozen=True):
    """Probe a device; answered with `Probed`."""

    device: DeviceId


class SetTimer(_Command, frozen=True):
    """Set the timer `key`; answered with `TimerFired(key)` at the time `at`."""

    at: float
    key: str


class Leave(_Command, frozen=True):
    """Send the last messages and exit."""


class Severity(enum.IntEnum):
    """Levels of Python's `logging`."""

    INFO = 20
    WARNING = 30
    ERROR = 40


class WriteLog(_Command, frozen=True):
    text: str
    severity: Severity = Severity.INFO


Command = (
    Tell | PassOn | Beat | Greet | Acknowledged | TellLibrary | Prepare | StartProcess | KillProcess | KillZygote |
    Forget | Observe | WeighOffer | PinObjects | Expect | StartFetch | StopFetch | TidySnapshots | BringArguments |
    ReleaseArguments | UploadResults | OfferSnapshot | Probe | SetTimer | Leave | WriteLog
)  # fmt: skip
