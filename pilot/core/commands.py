"""Commands of the pilot's core. The pilot executes the commands of an event in order."""

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


# ---- messages
class Tell(_Command, frozen=True, gc=False):
    """Send the manager a message, which is resent until acknowledged."""

    message: FromPilot


class Beat(_Command, frozen=True):
    """Send a heartbeat if the pilot is connected. The heartbeat may be lost."""

    message: Heartbeat


class PassOn(_Command, frozen=True, gc=False):
    """Send pieces of results in an unnumbered frame, if the pilot is connected."""

    message: CallYielded


class Greet(_Command, frozen=True):
    """Send a hello to the manager, then resend all unacknowledged frames."""

    hello: PilotHello


class Acknowledged(_Command, frozen=True):
    """Drop the kept frames up to `sequence`, which the manager has acknowledged."""

    sequence: int


class TellLibrary(_Command, frozen=True, gc=False):
    library: LibraryId
    message: ToLibrary


# ---- processes
class Prepare(_Command, frozen=True):
    """Create a library's folder. The answer is `LibraryPrepared`."""

    ordered: StartLibrary


class StartProcess(_Command, frozen=True):
    """Start the process of a library. `objects`: paths of objects, by cache name or snapshot form."""

    ordered: StartLibrary
    objects: Mapping[str, str]
    device_memory_bytes: int = 0


class KillProcess(_Command, frozen=True):
    """Kill the process of a library. The answer is `ProcessEnded`."""

    library: LibraryId


class KillZygote(_Command, frozen=True):
    """Kill the zygote that hangs in an import before it forks this library."""

    library: LibraryId


class Forget(_Command, frozen=True):
    """Close a library's socket, release its objects, and remove its folder."""

    library: LibraryId
    ran: Sequence[CallId]


class Observe(_Command, frozen=True):
    """Read the running calls and the memory of a library now. The answer is `Observed`."""

    library: LibraryId


class WeighOffer(_Command, frozen=True):
    """Examine the engines on a library's devices for an offered call. The answer is `OfferWeighed`."""

    order: RunCalls


# ---- objects
class PinObjects(_Command, frozen=True):
    """Pin those of these objects that are cached. The answer is `Pinned`."""

    library: LibraryId
    objects: Sequence[ObjectRef]


class Expect(_Command, frozen=True):
    """Serve the pieces of an object to other pilots while this pilot fetches the object."""

    name: str


class StartFetch(_Command, frozen=True):
    """Fetch an object from the sources in `order`, which replace earlier sources."""

    order: FetchObject


class StopFetch(_Command, frozen=True):
    name: str


class TidySnapshots(_Command, frozen=True):
    """Remove the snapshots that were made from evicted objects."""


class BringArguments(_Command, frozen=True):
    """Fetch large arguments of calls from the session. The answer is `ArgumentsBrought`."""

    library: LibraryId
    ticket: int
    wanted: Sequence[tuple[CallId, ObjectRef]]


class ReleaseArguments(_Command, frozen=True):
    library: LibraryId
    calls: Sequence[CallId]


class UploadResults(_Command, frozen=True):
    """Write large results to the session's folder. The answer is `ResultsUploaded`."""

    library: LibraryId
    ends: list[CallEnd]


class OfferSnapshot(_Command, frozen=True):
    """Put a snapshot into the cache. The answer is `SnapshotTaken`."""

    recipe: RecipeKey
    made: SnapshotMade


# ---- devices, timers, exit and log
class Probe(_Command, frozen=True):
    """Probe a device. The answer is `Probed`."""

    device: DeviceId


class SetTimer(_Command, frozen=True):
    """The answer is `TimerFired(key)` at the time `at`."""

    at: float
    key: str


class Leave(_Command, frozen=True):
    """Send the last messages and exit."""


class Severity(enum.IntEnum):
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
