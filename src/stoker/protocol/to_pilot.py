"""Messages of the manager to a pilot."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.calls import CallOptions, CallSpec, GangPlace
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class PilotWelcome(_Message, frozen=True, tag="welcome"):
    """The manager knows the pilot. StopLibrary and CancelCalls follow for unwanted libraries and calls. `again`: the
    manager has lost some of the pilot's messages; the pilot repeats what its hello does not state. `hello`: the number
    of the hello (0: unknown)."""

    session: str
    heartbeat_s: float
    lease_s: float
    again: bool = False
    hello: int = 0


class HelloAgain(_Message, frozen=True, tag="hello-again"):
    """The manager had given the pilot up, or its last hello is older than frames that the manager has handled, up to
    `acknowledged`."""

    acknowledged: int = 0


class PilotRefused(_Message, frozen=True, tag="refused"):
    """Wrong session or protocol, or the session is over. The pilot should exit."""

    reason: str


class StartLibrary(_Message, frozen=True, tag="start-library"):
    """Start a library of this recipe on these devices.

    `memory_bytes`: the limit on its host memory; `device_memory_bytes`: the reservation per device (0 = no limit).
    `snapshots`: of its loaded context, by form; they are worth `snapshot_wait_s` of waiting. `planned`: objects that
    the manager believes to be missing; `FetchObject` follows unasked. `steps`: step times of its engine on such
    devices, if known.
    """

    library: LibraryId
    recipe: Recipe
    devices: tuple[DeviceId, ...]
    memory_bytes: int = 0
    device_memory_bytes: int = 0
    snapshots: dict[str, ObjectRef] = msgspec.field(default_factory=dict)
    snapshot_wait_s: float = 0.0
    planned: tuple[str, ...] = ()
    steps: StepTimes | None = None


class StopLibrary(_Message, frozen=True, tag="stop-library"):
    """With `drain` it first finishes what it runs, and gives back the rest."""

    library: LibraryId
    reason: str
    drain: bool = True


class FunctionBlob(msgspec.Struct, frozen=True):
    """A function that is new to the library. `place`: the file of its program, or its module if that is installed."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""

    @property
    def measured_as(self) -> str:
        """The name under which its times are stored: `/home/ana/claims.py:verify`."""
        return f"{self.place}:{self.name}" if self.place else self.name


class RunCalls(_Message, frozen=True, tag="run", gc=False):
    """Calls for one library, in order, of one function with the same options.

    `function_blob`: with the first calls of a function. An `offer` may be refused. With `reserve_bytes` the library is
    resized for it, and keeps its size if the offer is refused. `waited_s`: how long an offered call has waited beyond
    the load of its library: its tokens are due earlier by this.
    """

    library: LibraryId
    function: FunctionKey
    calls: list[CallSpec]
    options: CallOptions = CallOptions()
    function_blob: FunctionBlob | None = None
    gang: GangPlace | None = None
    offer: bool = False
    reserve_bytes: int = 0
    waited_s: float = 0.0


class TakeBack(_Message, frozen=True, tag="take-back"):
    """Give back up to `count` calls that have not started, newest first. CallsReturned answers."""

    library: LibraryId
    count: int


class CancelCalls(_Message, frozen=True, tag="cancel-calls"):
    """Drop these calls if they have not started; if `running`, stop them. A running call has at least `grace_s` to
    react; then its library ends when its other calls have ended."""

    library: LibraryId
    calls: tuple[CallId, ...]
    running: bool = False
    grace_s: float = 0.0


class MeetGang(_Message, frozen=True, tag="meet-gang"):
    """The address at which rank 0 of a call's gang waits; this library is a member."""

    library: LibraryId
    call: CallId
    address: str


class EvictCall(_Message, frozen=True, tag="evict-call"):
    """Checkpoint a running call and give it back. CallEvicted or the call's end answers."""

    library: LibraryId
    call: CallId


class AckPieces(_Message, frozen=True, tag="ack-pieces"):
    """The client has the first `upto` pieces of this run of a call. `again`: send the others again."""

    library: LibraryId
    call: CallId
    run: int
    upto: int
    again: bool = False


class ResizeLibrary(_Message, frozen=True, tag="resize"):
    """Change the reservation on each device. LibraryResized answers."""

    library: LibraryId
    device_memory_bytes: int


class ServingPeer(msgspec.Struct, frozen=True):
    """A pilot that serves an object at this `host:port`."""

    pilot: PilotId
    address: str


class FetchObject(_Message, frozen=True, tag="fetch"):
    """The sources of an object from now on. `origin`: this pilot alone may read the object's origin. Without peers and
    origin the object is unavailable. `manifest`: the digests of its parts, sent once. `keep`: fetch it although nothing
    here needs it, because only a leaving pilot has it."""

    object: ObjectRef
    peers: tuple[ServingPeer, ...] = ()
    origin: bool = False
    manifest: bytes = b""
    keep: bool = False


class Ack(_Message, frozen=True, tag="ack"):
    """Frames up to this number are in the manager's journal."""

    sequence: int


class Exit(_Message, frozen=True, tag="exit"):
    """With `drain`, running calls finish first and others are given back. The pilot then stays for at most `hand_on_s`,
    while others fetch what only it has; a repeated Exit without it ends this stay."""

    reason: str
    drain: bool = False
    hand_on_s: float = 0.0


ToPilot = (
    PilotWelcome | HelloAgain | PilotRefused | StartLibrary | StopLibrary | RunCalls | TakeBack | CancelCalls
    | MeetGang | EvictCall | AckPieces | ResizeLibrary | FetchObject | Ack | Exit
)  # fmt: skip
