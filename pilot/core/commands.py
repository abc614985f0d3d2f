"""Commands of the pilot's core. Its shell carries them out in order, after the event that caused them."""

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
    """Say something to the manager that must arrive."""

    message: FromPilot


class Beat(_Command, frozen=True):
    """Send a heartbeat, if there is a connection. It need not arrive."""

    message: Heartbeat


class PassOn(_Command, frozen=True, gc=False):
    """Send pieces of results with this turn's frames, if there is a connection. They are not numbered."""

    message: CallYielded


class Greet(_Command, frozen=True):
    """Say hello, then everything again that was not acknowledged."""

    hello: PilotHello


class Acknowledged(_Command, frozen=True):
    """Drop frames up to this number: the manager has them."""

    sequence: int


class TellLibrary(_Command, frozen=True, gc=False):
    """Say something to a library."""

    library: LibraryId
    message: ToLibrary


# ---- processes


class Prepare(_Command, frozen=True):
    """Make a library's folder, and find out what `LibraryPrepared` tells."""

    ordered: StartLibrary


class StartProcess(_Command, frozen=True):
    """Start a library's process, which loads its context from these paths (by cache name or form)."""

    ordered: StartLibrary
    objects: Mapping[str, str]
    device_memory_bytes: int = 0


class KillProcess(_Command, frozen=True):
    """End a library's process at once; `ProcessEnded` tells that it has."""

    library: LibraryId


class KillZygote(_Command, frozen=True):
    """End the process that a library should be forked from: it hangs in an import."""

    library: LibraryId


class Forget(_Command, frozen=True):
    """Close a library's socket, release its objects, remove its folder and partial results."""

    library: LibraryId
    ran: Sequence[CallId]


class Observe(_Command, frozen=True):
    """Look at a library now, and tell by `Observed`."""

    library: LibraryId


class WeighOffer(_Command, frozen=True):
    """Look at the engines on a library's devices; answered with `OfferWeighed`."""

    order: RunCalls


# ---- objects


class PinObjects(_Command, frozen=True):
    """Pin these objects if they are in the cache; answered with `Pinned`."""

    library: LibraryId
    objects: Sequence[ObjectRef]


class Expect(_Command, frozen=True):
    """Serve an object's parts to peers as they arrive."""

    name: str


class StartFetch(_Command, frozen=True):
    """Have an object brought, from now on from where the order says."""

    order: FetchObject


class StopFetch(_Command, frozen=True):
    """An object is not wanted any more."""

    name: str


class TidySnapshots(_Command, frozen=True):
    """Objects have left the cache: remove snapshots that they were made of."""


class BringArguments(_Command, frozen=True):
    """Have large arguments of calls brought from the session; answered with `ArgumentsBrought`."""

    library: LibraryId
    ticket: int
    wanted: Sequence[tuple[CallId, ObjectRef]]


class ReleaseArguments(_Command, frozen=True):
    """These calls have ended: their large arguments may go."""

    library: LibraryId
    calls: Sequence[CallId]


class HandIn(_Command, frozen=True):
    """Bring large results of calls to the session; answered with `HandedIn`."""

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
    """Send `TimerFired(key)` at this time; it replaces an earlier timer of the key."""

    at: float
    key: str


class Leave(_Command, frozen=True):
    """Everything is done: say farewell and exit."""


class Severity(enum.IntEnum):
    """How much a line of the log matters, as Python's `logging` counts."""

    INFO = 20
    WARNING = 30
    ERROR = 40


class WriteLog(_Command, frozen=True):
    """Write a line to the pilot's log."""

    text: str
    severity: Severity = Severity.INFO


Command = (
    Tell | PassOn | Beat | Greet | Acknowledged | TellLibrary | Prepare | StartProcess | KillProcess | KillZygote |
    Forget | Observe | WeighOffer | PinObjects | Expect | StartFetch | StopFetch | TidySnapshots | BringArguments |
    ReleaseArguments | HandIn | OfferSnapshot | Probe | SetTimer | Leave | WriteLog
)  # fmt: skip
