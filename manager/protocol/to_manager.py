"""What clients and pilots say to the manager. The core's events are these, with the sender that the socket proved."""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.manager.protocol.blocks import BlockPhase, LossReason
from stoker.manager.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec, Failure
from stoker.manager.protocol.ids import BlockId, CallId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey
from stoker.manager.protocol.listed import ListedState


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- from clients


class ClientHello(_Message, frozen=True, tag="client-hello"):
    """A client joins, or comes back. `received` counts the results it has had in all, in order.

    An `observer` submits no calls; the `factory` is the one that carries out orders for blocks. Frames up to
    `acknowledged` were acknowledged, so the client keeps them no more. `number` is what an earlier welcome called it
    (-1: there was none).
    """

    protocol: int
    session: str
    received: int = 0
    observer: bool = False
    factory: bool = False
    acknowledged: int = 0
    number: int = -1


class Resubmitted(_Message, frozen=True, tag="resubmitted"):
    """The client was asked to say everything again (`ClientWelcome.again`), and has: it waits for no other calls than
    those that it has submitted since."""


class DefineRecipe(_Message, frozen=True, tag="recipe"):
    """A context recipe that calls may name from now on."""

    recipe: Recipe


class DefineManifest(_Message, frozen=True, tag="manifest"):
    """The digests of an object's parts, which pilots check what they get against (see `stoker.contexts.manifest`)."""

    object: str
    manifest: bytes


class DefineFunction(_Message, frozen=True, tag="function"):
    """A function that calls may name from now on. `blob` is its cloudpickle; `name` is for people."""

    key: FunctionKey
    name: str
    blob: bytes


class Submit(_Message, frozen=True, tag="submit"):
    """Calls of one function on one context with the same options, in the order in which they should run.

    `due_in_s`: the seconds that are left to the calls' deadline, below zero if it has passed; None = there is none, or
    `options` name it. Each side counts by its own clock: a client does not know the manager's.
    """

    function: FunctionKey
    recipe: RecipeKey
    calls: list[CallSpec]
    options: CallOptions = CallOptions()
    due_in_s: float | None = None


class Cancel(_Message, frozen=True, tag="cancel"):
    """Calls that nobody waits for any more. Those that run are stopped if `running`, else left to finish unheard."""

    calls: list[CallId]
    running: bool = False


class Received(_Message, frozen=True, tag="received"):
    """The client holds its first `total` results: the manager may forget them.

    So it may the `unused` functions, once no call that has come needs them: the client defines them again if it does.
    """

    total: int
    unused: tuple[FunctionKey, ...] = ()


class AskStatus(_Message, frozen=True, tag="ask-status"):
    """Answered with `to_client.Status`."""


class AskStory(_Message, frozen=True, tag="ask-story"):
    """`subject` is a call, pilot, library or context as people write it. Answered with `to_client.Story`."""

    subject: str


class AskCalls(_Message, frozen=True, tag="ask-calls"):
    """Which calls there are: `limit` of each state, or of `state` alone. Answered with `to_client.Calls`."""

    limit: int
    state: ListedState | None = None


class WantPilots(_Message, frozen=True, tag="want-pilots"):
    """The client's provider has changed its blocks: what `status` should say of them (state, reason).

    `ended`: those whose batch job is over. A pilot of such a block that is cut off will not come back. `most_pilots`:
    how many pilots there can be at once, 0 = any number.
    """

    blocks: dict[str, str]
    ended: tuple[str, ...] = ()
    most_pilots: int = 0


class ReleaseBlock(_Message, frozen=True, tag="release-block"):
    """Drain the pilots of this block and let them end."""

    block: str


class EndSession(_Message, frozen=True, tag="end-session"):
    """The client is done: end calls that are left as cancelled, let pilots go, and exit."""

    reason: str = ""


# ---- from the factory


class BlockNews(_Message, frozen=True, tag="block-news"):
    """What the batch system says of a block, when it has changed. `job` is the batch system's id; `expected_in_s` the
    time until it expects to start the job, 0 = it does not say. `loss`: why a job that ran does so no longer."""

    block: BlockId
    phase: BlockPhase
    job: str = ""
    reason: str = ""
    expected_in_s: float = 0.0
    loss: LossReason | None = None
    source: str = ""
    """Where the block comes from. Said of blocks that the manager does not know: it may have lost them."""
    cause: str = ""
    """What its job is held for by the batch system itself (`memory`); empty where it is not."""
    advice: str = ""
    """What the user can do about that."""


class SourceTrouble(_Message, frozen=True, tag="source-trouble"):
    """A batch system does not answer or refuses (in its own words); empty: it works again."""

    source: str
    text: str


# ---- from pilots


class DeviceFacts(msgspec.Struct, frozen=True):
    """One device: its kind (`cpu`, `NVIDIA A10`), memory in bytes, and cores that go with it.

    `processes`: how many processes may use it at once (0 = any number). `process_bytes`: memory that the device takes
    for each process, beside what the process asks for. `fault`: why nothing may be loaded on it; empty: it is well.
    """

    device: DeviceId
    kind: str
    memory_bytes: int
    cores: int = 1
    speed: float = 1.0
    processes: int = 0
    process_bytes: int = 0
    fault: str = ""

    @property
    def on_host(self) -> bool:
        """True if the device's memory is host memory."""
        return self.kind.startswith("cpu")


class LibraryFacts(msgspec.Struct, frozen=True):
    """A library that a pilot holds when it says hello again, with the calls in it, in order. Memory in bytes:
    `reserved_bytes` on each of its devices, and what it was measured to take of the host's and of a device's."""

    library: LibraryId
    recipe: RecipeKey
    devices: tuple[DeviceId, ...]
    ready: bool
    calls: tuple[CallId, ...] = ()
    reserved_bytes: int = 0
    memory_bytes: int = 0
    device_bytes: int = 0


class PilotHello(_Message, frozen=True, tag="pilot-hello"):
    """A pilot joins, or comes back with what it holds. `ends_in_s` is its walltime left (0 = no limit).

    `peer` is the `host:port` at which it serves its objects to other pilots; empty: it serves none. Pilots that say the
    same of their `cache` use the same one: what one brings there the others have. Frames up to `acknowledged` were
    acknowledged, so the pilot keeps them no more. `recipes` are those of its libraries, `last_library` is the highest
    number of a library that it was ever told to start, `faults` says which devices have failed and why: a manager that
    has lost a part of its journal learns of them here.
    `troubles`: what is wrong with what the pilot was granted, in words (a GPU that is lost and not offered). `lacks`:
    what its site asks for and it has not, so that nothing may be loaded on any device of it; empty: it has all.
    `number` counts the hellos of the pilot from 1: the welcome names the hello that it answers.
    """

    protocol: int
    session: str
    host: str
    pid: int
    devices: tuple[DeviceFacts, ...]
    block: str = ""
    libraries: tuple[LibraryFacts, ...] = ()
    objects: tuple[str, ...] = ()
    ends_in_s: float = 0.0
    folder: str = ""
    peer: str = ""
    cache: str = ""
    acknowledged: int = 0
    recipes: tuple[Recipe, ...] = ()
    last_library: int = 0
    faults: dict[DeviceId, str] = {}
    troubles: tuple[str, ...] = ()
    lacks: str = ""
    number: int = 0


class LibraryPhase(enum.Enum):
    """What a library that is not ready is doing."""

    FETCHING = "fetching"
    """Its objects are on their way to the pilot's disk."""
    WAITING = "waiting for room"
    """Its objects are there; the memory that it needs, or its place, is still another library's."""
    STARTING = "starting"
    """Its process is being made."""
    LOADING = "loading"
    """Its loader runs."""


class LibraryNews(_Message, frozen=True, tag="library-news"):
    """A library that is not ready has entered a phase, or has printed another last `line` in it."""

    library: LibraryId
    phase: LibraryPhase
    line: str = ""


class LibraryReady(_Message, frozen=True, tag="library-ready"):
    """A library holds its context and serves calls. Times in seconds, memory in bytes (device and host)."""

    library: LibraryId
    start_s: float
    load_s: float
    resident_bytes: int = 0
    peak_bytes: int = 0
    device_bytes: int = 0
    fetch_s: float = 0.0


class LibraryGone(_Message, frozen=True, tag="library-gone"):
    """A library has ended: retired, stopped, failed to load, or died.

    `running` are the calls that it was computing, `unstarted` those that it held and had not begun. `failure` is None
    when it ended as it was told to. `loading` says that it never became ready. `cache_lacks_bytes`: so much of what
    other libraries use in the pilot's cache would have to go, so that the objects of this one fit; 0 = they would.
    """

    library: LibraryId
    failure: Failure | None = None
    loading: bool = False
    running: tuple[CallId, ...] = ()
    unstarted: tuple[CallId, ...] = ()
    cache_lacks_bytes: int = 0


class CallsEnded(_Message, frozen=True, tag="ended", gc=False):
    """Calls of one library that have ended."""

    library: LibraryId
    ends: list[CallEnd]


class CallsReturned(_Message, frozen=True, tag="returned"):
    """Calls that a library gives back unstarted because it was asked to, or that a pilot refuses with a reason.

    `need_function`: the pilot no longer has the function; it will take the call with the function.
    """

    library: LibraryId
    calls: tuple[CallId, ...]
    refused: str = ""
    need_function: bool = False


class CallsProgress(_Message, frozen=True, tag="progress"):
    """Reports of running calls, batched."""

    library: LibraryId
    reports: list[CallProgress]


class CallEvicted(_Message, frozen=True, tag="evicted"):
    """A running call was stopped on request; `progress.state` lets it go on elsewhere."""

    library: LibraryId
    progress: CallProgress


class GangMeets(_Message, frozen=True, tag="gang-meets"):
    """Rank 0 of a gang awaits the others at this `host:port`."""

    library: LibraryId
    call: CallId
    address: str


class LibraryResized(_Message, frozen=True, tag="resized"):
    """A library's reservation on each of its devices is now this many bytes. `measured`: it answers no order; the pilot
    has measured that the library uses so much. `ordered_bytes`: what the order wanted that is answered; -1: unknown."""

    library: LibraryId
    device_memory_bytes: int
    measured: bool = False
    ordered_bytes: int = -1


class LibraryUse(msgspec.Struct, frozen=True, array_like=True):
    """What a library uses just now, measured: host and device memory in bytes, seconds of processor time in all."""

    library: LibraryId
    memory_bytes: int
    device_bytes: int = 0
    cpu_s: float = 0.0


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """A pilot is alive: measured memory of its libraries, and bytes of its object cache."""

    libraries: tuple[LibraryUse, ...] = ()
    cache_bytes: int = 0
    refused_frames: int = 0


class WantObjects(_Message, frozen=True, tag="want-objects"):
    """Objects that a pilot needs and lacks. Answered with `to_pilot.FetchObject`, now or when a source is free."""

    objects: tuple[ObjectRef, ...]


class ObjectArrival(msgspec.Struct, frozen=True):
    """An object that is now in a pilot's cache, and where its bytes came from."""

    name: str
    size_bytes: int
    origin_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


class ObjectsHere(_Message, frozen=True, tag="objects-here"):
    """Objects have come into a pilot's cache: it can serve them."""

    arrivals: tuple[ObjectArrival, ...]


class ObjectsGone(_Message, frozen=True, tag="objects-gone"):
    """Objects have left a pilot's cache, or are no longer wanted there."""

    names: tuple[str, ...]


class FetchFailed(_Message, frozen=True, tag="fetch-failed"):
    """Sources of an object that did not serve it. `peers`: could not be reached, hung, or served wrong bytes; `origin`:
    the place that it comes from could not be read here, for `reason`."""

    name: str
    peers: tuple[PilotId, ...] = ()
    origin: bool = False
    reason: str = ""


class DeviceFault(_Message, frozen=True, tag="device-fault"):
    """A device failed its probe: nothing more is to be loaded on it. An empty `reason`: it is well again."""

    device: DeviceId
    reason: str


class WalltimeNews(_Message, frozen=True, tag="walltime-news"):
    """What is left of a pilot's walltime is another time than its hello said: its batch system has answered since. A
    second hello would not do: it would deny what the manager has ordered since the first."""

    ends_in_s: float


class SnapshotHere(_Message, frozen=True, tag="snapshot-here"):
    """A library has written its loaded context as an object, from which others load faster. `form` names the variant
    (the library's own word: dtype and layout), `made_s` the seconds that it took to make."""

    recipe: RecipeKey
    form: str
    object: ObjectRef
    manifest: bytes = b""
    made_s: float = 0.0


class PilotLeaving(_Message, frozen=True, tag="leaving"):
    """A pilot ends in good order; what it still held it has given back. `loss`: why it must end although neither the
    manager nor its walltime wants it; None = they do, or it has nothing to do."""

    reason: str
    loss: LossReason | None = None


FromClient = (
    ClientHello | DefineRecipe | DefineManifest | DefineFunction | Submit | Cancel | Received | AskStatus | AskStory
    | AskCalls | WantPilots | ReleaseBlock | EndSession | BlockNews | SourceTrouble | Resubmitted
)  # fmt: skip
FromPilot = (
    PilotHello | LibraryNews | LibraryReady | LibraryGone | CallsEnded | CallsReturned | CallsProgress | CallEvicted
    | LibraryResized | Heartbeat | PilotLeaving | WantObjects | ObjectsHere | ObjectsGone | FetchFailed | DeviceFault
    | SnapshotHere | WalltimeNews | GangMeets
)  # fmt: skip
