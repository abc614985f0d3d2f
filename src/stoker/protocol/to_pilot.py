"""What the manager says to a pilot."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.calls import CallOptions, CallSpec, GangPlace
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class PilotWelcome(_Message, frozen=True, tag="welcome"):
    """The manager knows the pilot. What it no longer wants of it follows as StopLibrary and CancelCalls. `again`: the
    manager has lost a part of what the pilot had told it; the pilot says again what its hello does not. `hello`: the
    number of the hello that it answers (0: it does not say)."""

    session: str
    heartbeat_s: float
    lease_s: float
    again: bool = False
    hello: int = 0


class HelloAgain(_Message, frozen=True, tag="hello-again"):
    """The pilot should say hello with all that it holds: the manager had given it up and hears of it again, or its last
    hello spoke of the time before frames that the manager has taken. Frames up to `acknowledged` are taken."""

    acknowledged: int = 0


class PilotRefused(_Message, frozen=True, tag="refused"):
    """The manager does not want the pilot: wrong session or protocol, or the session is over. It should exit."""

    reason: str


class StartLibrary(_Message, frozen=True, tag="start-library"):
    """Start a library of this recipe on these devices.

    `memory_bytes` is the limit to enforce on its host memory, `device_memory_bytes` the reservation on each device
    (0 = not limited). `snapshots`: forms of its loaded context that can be had as objects, by their name; it is
    not worth to wait for them longer than `snapshot_wait_s`. `planned`: objects of the recipe that the manager believes
    to be lacking; where each may be had follows in `FetchObject`, unasked. `steps`: what steps of its engine take on
    such devices, where that is known.
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
    """End a library. With `drain` it first finishes what it runs, and gives back what it has not started."""

    library: LibraryId
    reason: str
    drain: bool = True


class FunctionBlob(msgspec.Struct, frozen=True):
    """A function that the library has not been sent before. `place`: the file of its program, or its module if that is
    installed; functions of two programs may have one name."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""

    @property
    def measured_as(self) -> str:
        """The name under which times of its calls are stored: `/home/ana/claims.py:verify`."""
        return f"{self.place}:{self.name}" if self.place else self.name


class RunCalls(_Message, frozen=True, tag="run", gc=False):
    """Calls for one library, in order, all of one function with the same options.

    `function_blob` goes along when the library has not been sent the function. An `offer` may be refused. With
    `reserve_bytes` the library is resized to that for it, as by ResizeLibrary, and stays as it is if the offer is
    refused. `waited_s`: how long an offered call has waited beyond the load of its library: its tokens are due so much
    earlier.
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
    """Give back up to `count` calls that the library has not started, newest first. CallsReturned answers."""

    library: LibraryId
    count: int


class CancelCalls(_Message, frozen=True, tag="cancel-calls"):
    """Drop these calls if they have not begun; if `running`, stop them. A call that runs is told to stop, and has
    `grace_s` for it, or more. If it does not react, its library ends when its other calls have ended."""

    library: LibraryId
    calls: tuple[CallId, ...]
    running: bool = False
    grace_s: float = 0.0


class MeetGang(_Message, frozen=True, tag="meet-gang"):
    """The address at which rank 0 waits for the other members of a call's gang; this library is one."""

    library: LibraryId
    call: CallId
    address: str


class EvictCall(_Message, frozen=True, tag="evict-call"):
    """Checkpoint a running call and give it back. CallEvicted or the call's end answers."""

    library: LibraryId
    call: CallId


class AckPieces(_Message, frozen=True, tag="ack-pieces"):
    """The client has the first `upto` pieces of this run of a call. `again`: the pilot sends the pieces that it still
    keeps again."""

    library: LibraryId
    call: CallId
    run: int
    upto: int
    again: bool = False


class ResizeLibrary(_Message, frozen=True, tag="resize"):
    """Change a library's reservation on each of its devices. LibraryResized answers."""

    library: LibraryId
    device_memory_bytes: int


class ServingPeer(msgspec.Struct, frozen=True):
    """A pilot that has an object or fetches it, and the `host:port` at which it serves it."""

    pilot: PilotId
    address: str


class FetchObject(_Message, frozen=True, tag="fetch"):
    """Where a pilot may get an object from now on; replaces what was said before of this object.

    `origin`: it may read the place that the object comes from, of which it is the one reader. Neither peers nor origin:
    nobody can give it. `manifest`: the digests of its parts, where the manager has them (else peers tell them; they are
    proven by the object's name); it comes along once. `keep`: it is to get it even if nothing there wants it, because
    only a pilot that is about to leave has it.
    """

    object: ObjectRef
    peers: tuple[ServingPeer, ...] = ()
    origin: bool = False
    manifest: bytes = b""
    keep: bool = False


class Ack(_Message, frozen=True, tag="ack"):
    """Frames up to this number are in the manager's journal and need not be kept."""

    sequence: int


class Exit(_Message, frozen=True, tag="exit"):
    """End everything and exit. With `drain`, running calls finish first and others are given back. Then the pilot stays
    for `hand_on_s` at most, while others get what only it has; said again without, it need not stay any longer."""

    reason: str
    drain: bool = False
    hand_on_s: float = 0.0


ToPilot = (
    PilotWelcome | HelloAgain | PilotRefused | StartLibrary | StopLibrary | RunCalls | TakeBack | CancelCalls
    | MeetGang | EvictCall | AckPieces | ResizeLibrary | FetchObject | Ack | Exit
)  # fmt: skip
