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
class SendToManager(_Command, frozen=True, gc=False):
    """Send a message to the manager, and resend it until acknowledged."""

    message: FromPilot


class SendHeartbeat(_Command, frozen=True):
    """Send a heartbeat if the pilot is connected. The heartbeat may be lost."""

    message: Heartbeat


class SendPieces(_Command, frozen=True, gc=False):
    """Send pieces of a call's result if the pilot is connected. The frame has no number and is not resent."""

    message: CallYielded


class SendHello(_Command, frozen=True):
    """Send a hello to the manager, then resend all unacknowledged frames."""

    hello: PilotHello


class DropAcknowledgedFrames(_Command, frozen=True):
    """Drop the kept frames up to number `sequence`, because the manager has acknowledged them."""

    sequence: int


MessageToManager = SendToManager | SendHeartbeat | SendPieces | SendHello | DropAcknowledgedFrames


class SendToLibrary(_Command, frozen=True, gc=False):
    library: LibraryId
    message: ToLibrary


# ---- processes
class PrepareLibrary(_Command, frozen=True):
    """Create a library's folder. `LibraryPrepared` reports the result."""

    ordered: StartLibrary


class StartProcess(_Command, frozen=True):
    """Start a library's process. `objects`: paths of objects by cache name, and paths of snapshots by digest."""

    ordered: StartLibrary
    objects: Mapping[str, str]
    device_memory_bytes: int = 0


class KillProcess(_Command, frozen=True):
    """Kill a library's process. `ProcessEnded` reports the end of the process."""

    library: LibraryId


class KillZygote(_Command, frozen=True):
    """Kill the zygote of this library, because an import hangs before the fork."""

    library: LibraryId


class RemoveLibrary(_Command, frozen=True):
    """Close a library's socket, release its objects, and remove its folder."""

    library: LibraryId
    ran: Sequence[CallId]


class ObserveLibrary(_Command, frozen=True):
    """Read a library's running calls and memory use now. `LibrariesObserved` reports them to the core."""

    library: LibraryId


class InspectOffer(_Command, frozen=True):
    """Collect the state of the engines on a library's devices for an offered call. `OfferInspected` reports the
    state.
    """

    order: RunCalls


# ---- objects
class PinObjects(_Command, frozen=True):
    """Pin the objects that are in the cache. `ObjectsPinned` reports the result."""

    library: LibraryId
    objects: Sequence[ObjectRef]


class AnnounceFetch(_Command, frozen=True):
    """Serve the pieces of an object to other pilots while this pilot fetches the object."""

    name: str


class StartFetch(_Command, frozen=True):
    """Fetch an object from the sources in `order`, and forget earlier sources."""

    order: FetchObject


class StopFetch(_Command, frozen=True):
    name: str


class RemoveEvictedSnapshots(_Command, frozen=True):
    """Remove the snapshots that were made from evicted objects."""


class FetchArguments(_Command, frozen=True):
    """Fetch large arguments of calls from the session. `ArgumentsFetched` reports the result."""

    library: LibraryId
    ticket: int
    wanted: Sequence[tuple[CallId, ObjectRef]]


class ReleaseArguments(_Command, frozen=True):
    library: LibraryId
    calls: Sequence[CallId]


class UploadResults(_Command, frozen=True):
    """Write large results to the session's folder. `ResultsUploaded` reports the completion."""

    library: LibraryId
    ends: list[CallEnd]


class OfferSnapshot(_Command, frozen=True):
    """Put a snapshot into the cache. `SnapshotTaken` reports success."""

    recipe: RecipeKey
    made: SnapshotMade


# ---- devices, timers, exit and log
class ProbeDevice(_Command, frozen=True):
    """Probe a device. `DeviceProbed` reports the verdict."""

    device: DeviceId


class SetTimer(_Command, frozen=True):
    """Send the event `TimerFired(key)` to the core at the time `at`."""

    at: float
    key: str


class ExitPilot(_Command, frozen=True):
    """Send the last messages and exit."""


class Severity(enum.IntEnum):
    INFO = 20
    WARNING = 30
    ERROR = 40


class WriteLog(_Command, frozen=True):
    text: str
    severity: Severity = Severity.INFO


Command = (
    MessageToManager | SendToLibrary | PrepareLibrary | StartProcess | KillProcess | KillZygote | RemoveLibrary |
    ObserveLibrary | InspectOffer | PinObjects | AnnounceFetch | StartFetch | StopFetch | RemoveEvictedSnapshots |
    FetchArguments | ReleaseArguments | UploadResults | OfferSnapshot | ProbeDevice | SetTimer | ExitPilot | WriteLog
)  # fmt: skip
