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
    """The manager accepts the pilot. StopLibrary and CancelCalls follow for unwanted libraries and calls. `again`:
    messages were lost, so the pilot repeats everything that its hello lacks. `hello`: the number of the answered hello
    (0: unknown).
    """

    session: str
    heartbeat_s: float
    lease_s: float
    again: bool = False
    hello: int = 0


class HelloAgain(_Message, frozen=True, tag="hello-again"):
    """Request another hello: the manager had declared the pilot lost, or has handled frames newer than the hello."""

    acknowledged: int = 0


class PilotRefused(_Message, frozen=True, tag="refused"):
    """The pilot should exit: wrong session or protocol, or the session is over."""

    reason: str


class StartLibrary(_Message, frozen=True, tag="start-library"):
    """Start a library of this recipe on these devices.

    `memory_bytes`: the limit on host memory. `device_memory_bytes`: the reservation per device (0: no limit).
    `snapshots`: snapshots of its context, by form. `snapshot_wait_s`: how long to wait until they are fetched.
    `planned`: objects that the pilot probably lacks; `FetchObject` follows for each. `steps`: known step times of its
    engine on such devices.
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
    """`drain`: True to finish running calls first and return other calls."""

    library: LibraryId
    reason: str
    drain: bool = True


class FunctionBlob(msgspec.Struct, frozen=True):
    """A function that is new to the library. `place`: the file of its program, or its installed module."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""

    @property
    def measured_as(self) -> str:
        """Name of the function's stored times: `/home/ana/claims.py:verify`."""
        return f"{self.place}:{self.name}" if self.place else self.name


class RunCalls(_Message, frozen=True, tag="run", gc=False):
    """Calls of one function for one library, in order. `offer`: True if the library may refuse. `reserve_bytes`: the
    library's new reservation for the offer. `waited_s`: seconds that an offered call has waited beyond the load of its
    library. Its tokens are due this much earlier. `preempts`: libraries on its devices that the manager ends if the
    pilot accepts the offer (`to_manager.OfferAccepted`).
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
    preempts: tuple[LibraryId, ...] = ()


class TakeBack(_Message, frozen=True, tag="take-back"):
    """Return up to `count` unstarted calls, newest first; answered with CallsReturned."""

    library: LibraryId
    count: int


class CancelCalls(_Message, frozen=True, tag="cancel-calls"):
    """Drop unstarted calls. `running`: True to stop running calls. A running call has at least `grace_s` to react. Then
    its library stops, after its other calls.
    """

    library: LibraryId
    calls: tuple[CallId, ...]
    running: bool = False
    grace_s: float = 0.0


class MeetGang(_Message, frozen=True, tag="meet-gang"):
    """The address at which rank 0 of a call's gang waits."""

    library: LibraryId
    call: CallId
    address: str


class EvictCall(_Message, frozen=True, tag="evict-call"):
    """Checkpoint and return a running call; answered with CallEvicted or the call's end."""

    library: LibraryId
    call: CallId


class AckPieces(_Message, frozen=True, tag="ack-pieces"):
    """The client has the first `upto` pieces of this run of a call. `again`: True to send later pieces again."""

    library: LibraryId
    call: CallId
    run: int
    upto: int
    again: bool = False


class ResizeLibrary(_Message, frozen=True, tag="resize"):
    """Change a library's reservation on each device; answered with LibraryResized."""

    library: LibraryId
    device_memory_bytes: int


class SleepLibrary(_Message, frozen=True, tag="sleep"):
    """Put a library without calls to sleep; answered with LibraryAsleep, LibraryAwake (refused) or LibraryGone.

    `device_memory_bytes`: what it should keep of each device. `host_bytes`: the host memory that its context will take.
    A second order repeats the answer.
    """

    library: LibraryId
    device_memory_bytes: int
    host_bytes: int = 0


class WakeLibrary(_Message, frozen=True, tag="wake"):
    """Wake a library, with this reservation on each device; answered with LibraryAwake or LibraryGone."""

    library: LibraryId
    device_memory_bytes: int


class ServingPeer(msgspec.Struct, frozen=True):
    """A pilot that serves an object at this `host:port`."""

    pilot: PilotId
    address: str


class FetchObject(_Message, frozen=True, tag="fetch"):
    """The current sources of an object: `peers`, and `origin` if this pilot alone should read its origin (neither:
    unavailable). `manifest`: the digests of its parts, sent once. `keep`: True to fetch an object that the pilot does
    not need, because its only holder is leaving.
    """

    object: ObjectRef
    peers: tuple[ServingPeer, ...] = ()
    origin: bool = False
    manifest: bytes = b""
    keep: bool = False


class Ack(_Message, frozen=True, tag="ack"):
    """The pilot's frames up to this number are in the manager's journal."""

    sequence: int


class Exit(_Message, frozen=True, tag="exit"):
    """Exit. `drain`: True to finish running calls first and return other calls. The pilot then stays up to `hand_on_s`,
    while other pilots fetch objects that only it holds. A second Exit without `hand_on_s` ends this wait.
    """

    reason: str
    drain: bool = False
    hand_on_s: float = 0.0


ToPilot = (
    PilotWelcome | HelloAgain | PilotRefused | StartLibrary | StopLibrary | RunCalls | TakeBack | CancelCalls
    | MeetGang | EvictCall | AckPieces | ResizeLibrary | SleepLibrary | WakeLibrary | FetchObject | Ack | Exit
)  # fmt: skip
