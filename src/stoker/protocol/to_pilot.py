"""Messages from the manager to a pilot."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.calls import CallOptions, CallSpec, GangPlace, Message
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId


class PilotWelcome(Message, frozen=True, tag="welcome"):
    """The manager accepts the pilot. `again`: messages were lost, so the pilot repeats all facts that its hello lacks.
    `hello`: number of the answered hello (0: unknown)."""

    session: str
    heartbeat_s: float
    lease_s: float
    again: bool = False
    hello: int = 0


class HelloAgain(Message, frozen=True, tag="hello-again"):
    """Send a new hello: the manager declared the pilot lost, or has handled frames newer than its hello."""

    acknowledged: int = 0


class PilotRefused(Message, frozen=True, tag="refused"):
    """Exit, because the session or the protocol version differs, or the session is over."""

    reason: str


class StartLibrary(Message, frozen=True, tag="start-library"):
    """Start a library. `memory_bytes`: limit on host memory. `device_memory_bytes`: reservation per device (0: no
    limit). `snapshots`: snapshots by format. `snapshot_wait_s`: maximum wait for snapshots. `planned`: objects that the
    pilot probably lacks, for which `FetchObject` follows. `steps`: known step times of the engine on these devices."""

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
    """Stop a library. `drain`: first finish running calls, and return all other calls."""

    library: LibraryId
    reason: str
    drain: bool = True


class FunctionBlob(msgspec.Struct, frozen=True):
    """A function that the library lacks. `place`: file of the function's program, or the installed module."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""

    @property
    def timing_key(self) -> str:
        """Name under which its run times are stored, such as `/home/ana/claims.py:verify`."""
        return f"{self.place}:{self.name}" if self.place else self.name


class RunCalls(Message, frozen=True, tag="run", gc=False):
    """Calls of one function for one library, in order. `offer`: the library may refuse. `reserve_bytes`: the library's
    new reservation for an offered call. `waited_s`: seconds that an offered call has waited, without the load of its
    library. The call's token deadlines are earlier by this time. `preempts`: libraries on the same devices that end if
    the pilot accepts."""

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
    """Drop unstarted calls. `running`: also stop running calls, which have at least `grace_s` seconds to react. After
    this time, the library stops when its other calls have ended."""

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
    """The client has received the first `upto` result pieces of run number `run` of a call. `again`: resend later
    pieces."""

    library: LibraryId
    call: CallId
    run: int
    upto: int
    again: bool = False


class ResizeLibrary(Message, frozen=True, tag="resize"):
    """Change a reservation per device. The pilot answers with LibraryResized."""

    library: LibraryId
    device_memory_bytes: int


class SleepLibrary(Message, frozen=True, tag="sleep"):
    """Put a library without calls to sleep. The pilot answers with LibraryAsleep, LibraryAwake (refused) or
    LibraryGone, also to a repeated order. `device_memory_bytes`: memory kept on each device. `host_bytes`: host memory
    of the sleeping context."""

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
    """The sources of an object to fetch (none: the object is unavailable). `origin`: read the object from its origin,
    which no other pilot does. `manifest`: digests of the object's parts, sent once. `keep`: fetch the object because
    the only pilot that has it exits."""

    object: ObjectRef
    peers: tuple[ServingPeer, ...] = ()
    origin: bool = False
    manifest: bytes = b""
    keep: bool = False


class Ack(Message, frozen=True, tag="ack"):
    """The manager's journal contains the pilot's frames up to `sequence`."""

    sequence: int


class Exit(Message, frozen=True, tag="exit"):
    """`drain`: first finish running calls, and return all other calls. `hand_on_s`: maximum stay while other pilots
    fetch objects that only this pilot has. A second Exit without `hand_on_s` ends this wait."""

    reason: str
    drain: bool = False
    hand_on_s: float = 0.0


ToPilot = (
    PilotWelcome | HelloAgain | PilotRefused | StartLibrary | StopLibrary | RunCalls | TakeBack | CancelCalls
    | MeetGang | EvictCall | AckPieces | ResizeLibrary | SleepLibrary | WakeLibrary | FetchObject | Ack | Exit
)  # fmt: skip
