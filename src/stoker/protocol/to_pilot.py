"""Messages from the manager to a pilot."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.calls import CallOptions, CallSpec, GangPlace, Message
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId


class PilotWelcome(Message, frozen=True, tag="welcome"):
    """The manager accepts the pilot. `again`: True if messages were lost. The pilot then repeats all facts that its
    hello did not contain. `hello`: number of the hello that this message answers (0: unknown).
    """

    session: str
    heartbeat_s: float
    lease_s: float
    again: bool = False
    hello: int = 0


class HelloAgain(Message, frozen=True, tag="hello-again"):
    """Send a new hello, because the manager declared the pilot lost, or has handled frames newer than the pilot's
    hello.
    """

    acknowledged: int = 0


class PilotRefused(Message, frozen=True, tag="refused"):
    """Exit, because the session or the protocol version differs, or the session is over."""

    reason: str


class StartLibrary(Message, frozen=True, tag="start-library"):
    """Start a library. `memory_bytes`: limit on host memory. `device_memory_bytes`: memory reserved per device (0: no
    limit). `snapshots`: snapshots of the context by format. `snapshot_wait_s`: maximum wait for snapshots. `planned`:
    objects that the pilot probably lacks. `FetchObject` messages for these objects follow. `steps`: known step times of
    the engine on these devices.
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


class StopLibrary(Message, frozen=True, tag="stop-library"):
    """Stop a library. `drain`: True to first finish running calls and return all other calls."""

    library: LibraryId
    reason: str
    drain: bool = True


class FunctionBlob(msgspec.Struct, frozen=True):
    """A function that the library lacks. `place`: source file of the function's program, or the name of an installed
    module.
    """

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""

    @property
    def timing_key(self) -> str:
        """Name under which the run times of the function are stored, such as `/home/ana/claims.py:verify`."""
        return f"{self.place}:{self.name}" if self.place else self.name


class RunCalls(Message, frozen=True, tag="run", gc=False):
    """Calls of one function for one library, in order. `offer`: True if the library may refuse. `reserve_bytes`: new
    memory reservation of the library, for an offered call. `waited_s`: seconds that an offered call has waited, minus
    the load time of its library. The call's token deadlines are earlier by this time. `preempts`: libraries that end on
    the same devices if the pilot accepts.
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


class TakeBack(Message, frozen=True, tag="take-back"):
    """Return up to `count` unstarted calls, newest first, with CallsReturned."""

    library: LibraryId
    count: int


class CancelCalls(Message, frozen=True, tag="cancel-calls"):
    """Drop unstarted calls. `running`: True to also stop running calls, which have at least `grace_s` seconds to react.
    If a call is still running after this time, stop the library when its other calls have ended.
    """

    library: LibraryId
    calls: tuple[CallId, ...]
    running: bool = False
    grace_s: float = 0.0


class MeetGang(Message, frozen=True, tag="meet-gang"):
    """Rank 0 of a call's gang waits at `address`."""

    library: LibraryId
    call: CallId
    address: str


class EvictCall(Message, frozen=True, tag="evict-call"):
    """Checkpoint a running call. The pilot answers with CallEvicted or the end of the call."""

    library: LibraryId
    call: CallId


class AckPieces(Message, frozen=True, tag="ack-pieces"):
    """The client has received the first `upto` result pieces of run number `run` of a call. `again`: True to resend
    later pieces.
    """

    library: LibraryId
    call: CallId
    run: int
    upto: int
    again: bool = False


class ResizeLibrary(Message, frozen=True, tag="resize"):
    """Change a library's memory reservation per device. The pilot answers with LibraryResized."""

    library: LibraryId
    device_memory_bytes: int


class SleepLibrary(Message, frozen=True, tag="sleep"):
    """Put a library without calls to sleep. The pilot answers each order, even a repeated one, with LibraryAsleep,
    LibraryAwake (refused) or LibraryGone. `device_memory_bytes`: memory that the library keeps on each device.
    `host_bytes`: host memory of the sleeping context.
    """

    library: LibraryId
    device_memory_bytes: int
    host_bytes: int = 0


class WakeLibrary(Message, frozen=True, tag="wake"):
    """Wake a library with a new reservation per device. The pilot answers with LibraryAwake or LibraryGone."""

    library: LibraryId
    device_memory_bytes: int


class ServingPeer(msgspec.Struct, frozen=True):
    """A pilot that serves an object at `address` (`host:port`)."""

    pilot: PilotId
    address: str


class FetchObject(Message, frozen=True, tag="fetch"):
    """Fetch an object from the given sources (no source: the object is unavailable). `origin`: True to read the object
    from its origin. Only one pilot does this. `manifest`: digests of the object's parts, sent once. `keep`: True if the
    object must be saved because the only pilot that has it exits.
    """

    object: ObjectRef
    peers: tuple[ServingPeer, ...] = ()
    origin: bool = False
    manifest: bytes = b""
    keep: bool = False


class Ack(Message, frozen=True, tag="ack"):
    """The manager has stored the pilot's frames up to number `sequence` in its journal."""

    sequence: int


class Exit(Message, frozen=True, tag="exit"):
    """Exit. `drain`: True to first finish running calls and return all other calls. `hand_on_s`: maximum seconds to
    wait while other pilots fetch objects that only this pilot has. A second Exit without `hand_on_s` ends this wait.
    """

    reason: str
    drain: bool = False
    hand_on_s: float = 0.0


ToPilot = (
    PilotWelcome | HelloAgain | PilotRefused | StartLibrary | StopLibrary | RunCalls | TakeBack | CancelCalls
    | MeetGang | EvictCall | AckPieces | ResizeLibrary | SleepLibrary | WakeLibrary | FetchObject | Ack | Exit
)  # fmt: skip
