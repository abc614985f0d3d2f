"""Messages from clients, the factory and pilots to the manager."""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.inference.adapter import EngineLoad, TokenCache
from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec, Failure, ListedState, RefusalCase
from stoker.protocol.ids import BlockId, CallId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- from clients


class ClientHello(_Message, frozen=True, tag="client-hello"):
    """A client joins or reconnects. `observer`: True if the client submits no calls. `factory`: True if the client is
    the factory, which submits and cancels blocks.

    `received`: number of results that the client has received. `acknowledged`: highest number of a frame that the
    manager has acknowledged. `number`: the client's number from an earlier welcome, or -1.
    """

    protocol: int
    session: str
    received: int = 0
    observer: bool = False
    factory: bool = False
    acknowledged: int = 0
    number: int = -1


class Resubmitted(_Message, frozen=True, tag="resubmitted"):
    """The client has resubmitted all its open calls (`ClientWelcome.again`)."""


class DefineRecipe(_Message, frozen=True, tag="recipe"):
    recipe: Recipe


class DefineManifest(_Message, frozen=True, tag="manifest"):
    """The digests of an object's parts (`stoker.contexts.manifest`)."""

    object: str
    manifest: bytes


class DefineFunction(_Message, frozen=True, tag="function"):
    """A function. `blob`: bytes from cloudpickle. `place`: see `to_pilot.FunctionBlob`."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""


class Submit(_Message, frozen=True, tag="submit"):
    """Calls of one function with one context, in the order in which they should run. `due_in_s`: seconds until the
    deadline of the calls (negative: the deadline has passed; None: use the deadline in `options`, if any).
    """

    function: FunctionKey
    recipe: RecipeKey
    calls: list[CallSpec]
    options: CallOptions = CallOptions()
    due_in_s: float | None = None


class MapReport(_Message, frozen=True, tag="map"):
    """The progress of a `stoker.map`. `map`: number of the map. `total`: number of items (-1: unknown). `done`: number
    of items with a result.

    `kept`: number of items with a result of an earlier run. `unsent`: number of calls that the client will still submit
    (-1: unknown).
    """

    map: int
    name: str
    context: RecipeKey
    total: int = -1
    done: int = 0
    kept: int = 0
    unsent: int = -1
    over: bool = False


class Cancel(_Message, frozen=True, tag="cancel"):
    """Cancel calls. `running`: True to stop running calls, False to drop their results."""

    calls: list[CallId]
    running: bool = False


class Received(_Message, frozen=True, tag="received"):
    """The client has received its first `total` results, so the manager may delete these results. The manager may also
    delete the functions in `unused` when no open call needs them.
    """

    total: int
    unused: tuple[FunctionKey, ...] = ()


class PiecesTaken(_Message, frozen=True, tag="pieces-taken"):
    """The client has received the first `upto` result pieces of run number `run` of a call. `again`: True to request
    the later pieces again.

    This message has no frame number and is not in the journal.
    """

    call: CallId
    run: int
    upto: int
    again: bool = False


class AskStatus(_Message, frozen=True, tag="ask-status"):
    """Request the status. The manager answers with `to_client.Status`."""


class AskStory(_Message, frozen=True, tag="ask-story"):
    """Ask why a call, pilot, library or context is in its state. The manager answers with `to_client.Story`."""

    subject: str


class AskCalls(_Message, frozen=True, tag="ask-calls"):
    """Request up to `limit` calls in `state` (None: in each state). The manager answers with `to_client.Calls`."""

    limit: int
    state: ListedState | None = None


class WantPilots(_Message, frozen=True, tag="want-pilots"):
    """The states of the blocks of a client's Parsl provider, sent after each change. `ended`: blocks whose jobs have
    ended, so their pilots never reconnect. `most_pilots`: maximum number of pilots (0: no maximum).
    """

    blocks: dict[str, str]
    ended: tuple[str, ...] = ()
    most_pilots: int = 0


class ReleaseBlock(_Message, frozen=True, tag="release-block"):
    """Drain the pilots of a block."""

    block: str


class EndSession(_Message, frozen=True, tag="end-session"):
    """Cancel the client's open calls, stop the pilots, and exit."""

    reason: str = ""


# ---- from the factory


class BlockUpdate(_Message, frozen=True, tag="block-news"):
    """The new state of a block in its batch system. `job`: id of the block's job. `expected_in_s`: seconds until the
    expected start of the job (0: unknown). `loss`: why the job ended while it ran. `no_node`: True if the batch system
    has no allowed node for the block.
    """

    block: BlockId
    phase: BlockPhase
    job: str = ""
    reason: str = ""
    expected_in_s: float = 0.0
    loss: LossReason | None = None
    source: str = ""
    """Source of the block. A manager that has lost the end of its journal may not know the block."""
    cause: str = ""
    """Reason for which the batch system holds or last held the job, such as `memory`."""
    advice: str = ""
    """Advice for the user on how to release the held job."""
    holds: int = 0
    no_node: bool = False


class SourceTrouble(_Message, frozen=True, tag="source-trouble"):
    """A batch system does not answer, or refuses commands. Empty `text`: the batch system works again."""

    source: str
    text: str


# ---- from pilots


class DeviceFacts(msgspec.Struct, frozen=True):
    """A device of a pilot. `kind`: for example `cpu` or `NVIDIA A10`. `processes`: maximum number of processes on the
    device (0: any number). `process_bytes`: memory overhead per process. `fault`: why nothing may be loaded on the
    device. `spare`: True for CPU cores that the GPUs do not need. These cores are for contexts that name the device's
    kind in `kinds`. `island`: number of the device's group. Devices of one group have a fast link: NVLink, or without
    NVLink the same NUMA node (0: unknown).
    """

    device: DeviceId
    kind: str
    memory_bytes: int
    cores: int = 1
    processes: int = 0
    process_bytes: int = 0
    fault: str = ""
    spare: bool = False
    island: int = 0

    @property
    def on_host(self) -> bool:
        return self.kind.startswith("cpu")


class LibraryFacts(msgspec.Struct, frozen=True):
    """A library in a pilot's hello, with the library's calls in order. `reserved_bytes`: reserved memory per device.
    `memory_bytes`, `device_bytes`: measured memory on host and device. `slots`: maximum number of concurrent calls (0:
    unknown, or as in the recipe). `cache`: see `LibraryReady`. `sleeps`: True if the context can sleep. `asleep`: True
    if the library sleeps, or was ordered to sleep. `awake_bytes`: reservation per device before the sleep.
    `host_bytes`: reserved host memory of a sleeping context.
    """

    library: LibraryId
    recipe: RecipeKey
    devices: tuple[DeviceId, ...]
    ready: bool
    calls: tuple[CallId, ...] = ()
    reserved_bytes: int = 0
    memory_bytes: int = 0
    device_bytes: int = 0
    slots: int = 0
    cache: TokenCache | None = None
    sleeps: bool = False
    asleep: bool = False
    awake_bytes: int = 0
    host_bytes: int = 0


class PilotHello(_Message, frozen=True, tag="pilot-hello"):
    """A pilot joins, or reconnects and reports its state. `number`: number of this hello among the pilot's hellos.
    `ends_in_s`: seconds of walltime left (0: no limit).

    `peer`: `host:port` at which the pilot serves objects. Pilots with the same `cache` share a cache. `acknowledged`:
    highest number of a frame that the manager has acknowledged. `troubles`: faults of the job's devices, such as a lost
    GPU. `lacks`: a requirement of the site that is not met, so that the pilot cannot load contexts. `node`: name of the
    node in the batch system. `sleeper_bytes`: host memory for GPU contexts that sleep.

    A manager that lost the end of its journal needs `recipes`, `faults` and `last_library`, the highest library number
    that the pilot received.
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
    node: str = ""
    sleeper_bytes: int = 0


class LibraryPhase(enum.Enum):
    FETCHING = "fetching"
    WAITING = "waiting for room"
    """The library's objects are cached, but another library occupies the memory or the device."""
    STARTING = "starting"
    LOADING = "loading"
    WAKING = "waking"


class LibraryUpdate(_Message, frozen=True, tag="library-news"):
    """A library that is not ready has entered a new `phase`, or has printed a new line of output (`line`)."""

    library: LibraryId
    phase: LibraryPhase
    line: str = ""


class LibraryReady(_Message, frozen=True, tag="library-ready"):
    """A library has loaded its context. `resident_bytes`, `peak_bytes`: current and highest host memory. `slots`:
    maximum number of concurrent calls (0: as in the recipe). `cache`: memory of a language model by number of cached
    tokens (None: the context is no language model). `sleeps`: True if the context can sleep.
    """

    library: LibraryId
    start_s: float
    load_s: float
    resident_bytes: int = 0
    peak_bytes: int = 0
    device_bytes: int = 0
    fetch_s: float = 0.0
    slots: int = 0
    cache: TokenCache | None = None
    sleeps: bool = False


class LibraryAsleep(_Message, frozen=True, tag="asleep"):
    """A library sleeps. `device_memory_bytes`: measured reservation per device. `host_bytes`: measured reservation of
    host memory. `sleep_s`: seconds that the context needed to sleep.
    """

    library: LibraryId
    device_memory_bytes: int
    host_bytes: int = 0
    sleep_s: float = 0.0


class LibraryAwake(_Message, frozen=True, tag="awake"):
    """A library serves calls again, or refuses to sleep. `device_memory_bytes`: reservation per device. `wake_s`:
    seconds that the context needed to wake. `refused`: why the library refuses.
    """

    library: LibraryId
    device_memory_bytes: int
    wake_s: float = 0.0
    refused: str = ""


class LibraryGone(_Message, frozen=True, tag="library-gone"):
    """A library has retired, stopped, failed to load, or died.

    `running`: calls that the library was running. `unstarted`: all other calls of the library. `failure`: None if the
    manager ordered the end. `loading`: True if the library was never ready. `cache_lacks_bytes`: bytes that other
    libraries would have to release in the pilot's cache, so that the objects of this library fit.
    """

    library: LibraryId
    failure: Failure | None = None
    loading: bool = False
    running: tuple[CallId, ...] = ()
    unstarted: tuple[CallId, ...] = ()
    cache_lacks_bytes: int = 0


class CallsEnded(_Message, frozen=True, tag="ended", gc=False):
    library: LibraryId
    ends: list[CallEnd]


class CallsReturned(_Message, frozen=True, tag="returned"):
    """A library returns unstarted calls as ordered, or a pilot refuses calls. `refused`: reason for the refusal.
    `need_function`: True if the pilot lacks the function of the calls. `required_bytes`: reservation per device with
    which the library could accept the call (0: other reason). `over_s`: seconds by which a decode step of each engine
    on the device would exceed the time per output token (0: other reason). `case`: why the pilot refused an offered
    call.
    """

    library: LibraryId
    calls: tuple[CallId, ...]
    refused: str = ""
    need_function: bool = False
    required_bytes: int = 0
    over_s: float = 0.0
    case: RefusalCase | None = None


class OfferAccepted(_Message, frozen=True, tag="accepted"):
    """A library accepted an offered call on the condition that the libraries in `preempts` end. `reserve_bytes`: see
    `to_pilot.RunCalls`.
    """

    library: LibraryId
    call: CallId
    preempts: tuple[LibraryId, ...]
    reserve_bytes: int = 0


class CallsProgress(_Message, frozen=True, tag="progress"):
    library: LibraryId
    reports: list[CallProgress]


class CallYielded(_Message, frozen=True, tag="yielded", gc=False):
    """Pieces of the result of a running call (`to_agent.Yielded`). The pilot keeps the pieces until they are
    acknowledged, and resends them after each welcome. This message has no frame number and is not in the journal.
    """

    library: LibraryId
    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class CallEvicted(_Message, frozen=True, tag="evicted"):
    """A running call was stopped by order of the manager. The call can resume elsewhere from `progress.state`."""

    library: LibraryId
    progress: CallProgress


class GangMeets(_Message, frozen=True, tag="gang-meets"):
    """Rank 0 of a gang waits for the other ranks at `address` (`host:port`)."""

    library: LibraryId
    call: CallId
    address: str


class LibraryResized(_Message, frozen=True, tag="resized"):
    """The new memory reservation of a library per device. `measured`: True if the pilot measured the reservation
    without an order of the manager. `ordered_bytes`: reservation in the manager's order (-1: unknown).
    """

    library: LibraryId
    device_memory_bytes: int
    measured: bool = False
    ordered_bytes: int = -1


class LibraryBatch(_Message, frozen=True, tag="batch"):
    """The batch load of an inference engine, and the step times since the last report. Sent at most every 10 s."""

    library: LibraryId
    load: EngineLoad
    times: StepTimes = StepTimes()


class LibraryUse(msgspec.Struct, frozen=True, array_like=True):
    """A library's measured use of memory and processors. `cpu_s`: total CPU seconds."""

    library: LibraryId
    memory_bytes: int
    device_bytes: int = 0
    cpu_s: float = 0.0


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    libraries: tuple[LibraryUse, ...] = ()
    cache_bytes: int = 0
    refused_frames: int = 0


class WantObjects(_Message, frozen=True, tag="want-objects"):
    """Objects that a pilot lacks. The manager answers with `to_pilot.FetchObject`."""

    objects: tuple[ObjectRef, ...]


class ObjectArrival(msgspec.Struct, frozen=True):
    """An object that a pilot has cached, with the bytes received from the origin and from other pilots."""

    name: str
    size_bytes: int
    origin_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


class ObjectsHere(_Message, frozen=True, tag="objects-here"):
    arrivals: tuple[ObjectArrival, ...]


class ObjectsGone(_Message, frozen=True, tag="objects-gone"):
    """Objects that a pilot's cache no longer has, or that the pilot no longer needs."""

    names: tuple[str, ...]


class FetchFailed(_Message, frozen=True, tag="fetch-failed"):
    """A fetch of an object failed. `peers`: pilots that did not answer, hung, or sent wrong bytes. `origin`: True if
    the origin was unreadable.
    """

    name: str
    peers: tuple[PilotId, ...] = ()
    origin: bool = False
    reason: str = ""


class DeviceFault(_Message, frozen=True, tag="device-fault"):
    """A device failed its probe. Empty `reason`: the device works again."""

    device: DeviceId
    reason: str


class WalltimeUpdate(_Message, frozen=True, tag="walltime-news"):
    """The batch system has changed the pilot's walltime. The pilot does not send this change in a second hello, which
    would revoke the manager's orders since the first hello."""

    ends_in_s: float


class SnapshotHere(_Message, frozen=True, tag="snapshot-here"):
    """A library has written its loaded context as an object, for faster loads. `form`: dtype and layout."""

    recipe: RecipeKey
    form: str
    object: ObjectRef
    manifest: bytes = b""
    made_s: float = 0.0


class PilotLeaving(_Message, frozen=True, tag="leaving"):
    """A pilot has returned its calls and exits. `loss`: why the pilot is lost (None: the manager ended it, its
    walltime ended, or it was idle)."""

    reason: str
    loss: LossReason | None = None


FromClient = (
    ClientHello | DefineRecipe | DefineManifest | DefineFunction | Submit | Cancel | Received | AskStatus | AskStory
    | AskCalls | WantPilots | ReleaseBlock | EndSession | BlockUpdate | SourceTrouble | Resubmitted | PiecesTaken
    | MapReport
)  # fmt: skip
FromPilot = (
    PilotHello | LibraryUpdate | LibraryReady | LibraryGone | CallsEnded | CallsReturned | OfferAccepted | CallsProgress
    | CallEvicted | LibraryResized | Heartbeat | PilotLeaving | WantObjects | ObjectsHere | ObjectsGone | FetchFailed
    | DeviceFault | SnapshotHere | WalltimeUpdate | GangMeets | CallYielded | LibraryBatch | LibraryAsleep
    | LibraryAwake
)  # fmt: skip
