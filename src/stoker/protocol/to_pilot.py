"""Messages from the manager to a pilot."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.calls import CallOptions, CallSpec, GangPlace
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class PilotWelcome(_Message, frozen=True, tag="welcome"):
    """The manager accepts the pilot. The manager then sends StopLibrary and CancelCalls for libraries and calls that
    it does not want.

    `again`: True if messages of the pilot were lost. The pilot then repeats everything that is not in its hello.
    `hello`: number of the hello that the manager answers (0: unknown).
    """

    session: str
    heartbeat_s: float
    lease_s: float
    again: bool = False
    hello: int = 0


class HelloAgain(_Message, frozen=True, tag="hello-again"):
    """Send another hello. The manager had declared the pilot lost, or has handled frames newer than the hello."""

    acknowledged: int = 0


class PilotRefused(_Message, frozen=True, tag="refused"):
    """The pilot should exit, because it has another session or protocol version, or the session is over."""

    reason: str


class StartLibrary(_Message, frozen=True, tag="start-library"):
    """Start a library of `recipe` on `devices`.

    `memory_bytes`: limit on host memory. `device_memory_bytes`: memory reservation per device (0: no limit).
    `snapshots`: snapshots of the context, by format. `snapshot_wait_s`: maximum seconds to wait until snapshots are
    fetched. `planned`: objects that the pilot probably lacks. A `FetchObject` message follows for each of these
    objects. `steps`: known step times of the inference engine on these devices.
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
    """Stop a library. `drain`: True to finish running calls first and return all other calls."""

    library: LibraryId
    reason: str
    drain: bool = True


class FunctionBlob(msgspec.Struct, frozen=True):
    """A function that the library does not have yet. `place`: file of the program that defines the function, or the
    function's installed module."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""

    @property
    def timing_key(self) -> str:
        """Name under which run times of the function are stored, such as `/home/ana/claims.py:verify`."""
        return f"{self.place}:{self.name}" if self.place else self.name


class RunCalls(_Message, frozen=True, tag="run", gc=False):
    """Calls of one function for one library, in order. `offer`: True if the library may refuse the calls.
    `reserve_bytes`: new memory reservation that the library gets for an offered call. `waited_s`: seconds that an
    offered call has waited, without the time of the library's load. The deadlines of the call's tokens are earlier by
    this time. `preempts`: libraries on the same devices that the manager ends if the pilot accepts the offered call
    (`to_manager.OfferAccepted`).
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
    """Return up to `count` unstarted calls, newest first. The pilot answers with CallsReturned."""

    library: LibraryId
    count: int


class CancelCalls(_Message, frozen=True, tag="cancel-calls"):
    """Drop unstarted calls. `running`: True to stop running calls as well.

    A running call has at least `grace_s` seconds to react. After this time, the library of the call stops when its
    other calls have ended.
    """

    library: LibraryId
    calls: tuple[CallId, ...]
    running: bool = False
    grace_s: float = 0.0


class MeetGang(_Message, frozen=True, tag="meet-gang"):
    """Rank 0 of a call's gang waits at `address`."""

    library: LibraryId
    call: CallId
    address: str


class EvictCall(_Message, frozen=True, tag="evict-call"):
    """Checkpoint and return a running call. The pilot answers with CallEvicted or the end of the call."""

    library: LibraryId
    call: CallId


class AckPieces(_Message, frozen=True, tag="ack-pieces"):
    """The client has received the first `upto` result pieces of run number `run` of a call. `again`: True to resend
    later pieces."""

    library: LibraryId
    call: CallId
    run: int
    upto: int
    again: bool = False


class ResizeLibrary(_Message, frozen=True, tag="resize"):
    """Change a library's reservation on each device. The pilot answers with LibraryResized."""

    library: LibraryId
    device_memory_bytes: int


class SleepLibrary(_Message, frozen=True, tag="sleep"):
    """Put a library without calls to sleep. The pilot answers with LibraryAsleep, LibraryAwake (refused) or
    LibraryGone.

    `device_memory_bytes`: memory that the library keeps on each device. `host_bytes`: host memory of the sleeping
    context. If the manager repeats the order, the pilot repeats its answer.
    """

    library: LibraryId
    device_memory_bytes: int
    host_bytes: int = 0


class WakeLibrary(_Message, frozen=True, tag="wake"):
    """Wake a library with a new reservation on each device. The pilot answers with LibraryAwake or LibraryGone."""

    library: LibraryId
    device_memory_bytes: int


class ServingPeer(msgspec.Struct, frozen=True):
    """A pilot that serves an object at `address` (`host:port`)."""

    pilot: PilotId
    address: str


class FetchObject(_Message, frozen=True, tag="fetch"):
    """The current sources of an object that the pilot should fetch (no source: the object is unavailable). `origin`:
    True for the one pilot that should read the object from its origin. `manifest`: digests of the object's parts, sent
    once. `keep`: True to fetch an object that this pilot does not need, because the only pilot with the object exits.
    """

    object: ObjectRef
    peers: tuple[ServingPeer, ...] = ()
    origin: bool = False
    manifest: bytes = b""
    keep: bool = False


class Ack(_Message, frozen=True, tag="ack"):
    """The manager's journal contains the pilot's frames up to `sequence`."""

    sequence: int


class Exit(_Message, frozen=True, tag="exit"):
    """The pilot should exit. `drain`: True to finish running calls first and return all other calls. `hand_on_s`:
    maximum seconds that the pilot then stays while other pilots fetch objects that only this pilot has. A second Exit
    without `hand_on_s` ends this wait.
    """

    reason: str
    drain: bool = False
    hand_on_s: float = 0.0


ToPilot = (
    PilotWelcome | HelloAgain | PilotRefused | StartLibrary | StopLibrary | RunCalls | TakeBack | CancelCalls
    | MeetGang | EvictCall | AckPieces | ResizeLibrary | SleepLibrary | WakeLibrary | FetchObject | Ack | Exit
)  # fmt: skip
