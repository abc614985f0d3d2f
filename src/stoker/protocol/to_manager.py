"""Messages of clients, the factory and pilots to the manager."""

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
    """A client joins or reconnects. An `observer` submits no calls. The `factory` submits and cancels blocks.
    `received`: the number of results that the client has. `acknowledged`: the client no longer has its frames up to
    this number. `number`: the client's, from an earlier welcome, or -1.
    """

    protocol: int
    session: str
    received: int = 0
    observer: bool = False
    factory: bool = False
    acknowledged: int = 0
    number: int = -1


class Resubmitted(_Message, frozen=True, tag="resubmitted"):
    """The client has submitted all its open calls again (`ClientWelcome.again`)."""


class DefineRecipe(_Message, frozen=True, tag="recipe"):
    recipe: Recipe


class DefineManifest(_Message, frozen=True, tag="manifest"):
    """The digests of an object's parts (`stoker.contexts.manifest`)."""

    object: str
    manifest: bytes


class DefineFunction(_Message, frozen=True, tag="function"):
    """`blob`: the function's cloudpickle. `place`: see `to_pilot.FunctionBlob`."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""


class Submit(_Message, frozen=True, tag="submit"):
    """Calls of one function on one context, in running order. `due_in_s`: seconds until the deadline, negative if it
    has passed (None: no deadline, or the one in `options`).
    """

    function: FunctionKey
    recipe: RecipeKey
    calls: list[CallSpec]
    options: CallOptions = CallOptions()
    due_in_s: float | None = None


class MapReport(_Message, frozen=True, tag="map"):
    """The progress of a `stoker.map`. `map`: its number.

    `total`, `done`: numbers of items (-1: unknown). `kept`: items with a result of an earlier run. `unsent`: calls that
    the client will still submit (-1: unknown).
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
    """Cancel calls. `running`: True to stop running ones, False to drop their results."""

    calls: list[CallId]
    running: bool = False


class Received(_Message, frozen=True, tag="received"):
    """The client has its first `total` results, so the manager may forget them. It may also forget the `unused`
    functions once no open call needs them.
    """

    total: int
    unused: tuple[FunctionKey, ...] = ()


class PiecesTaken(_Message, frozen=True, tag="pieces-taken"):
    """The client has the first `upto` pieces of this run of a call. `again`: True to request the later pieces again.
    This message is never numbered or in the journal.
    """

    call: CallId
    run: int
    upto: int
    again: bool = False


class AskStatus(_Message, frozen=True, tag="ask-status"):
    """Request the status; answered with `to_client.Status`."""


class AskStory(_Message, frozen=True, tag="ask-story"):
    """Request a call's, pilot's, library's or context's story (`subject`); answered with `to_client.Story`."""

    subject: str


class AskCalls(_Message, frozen=True, tag="ask-calls"):
    """Request up to `limit` calls of `state`, or of each state; answered with `to_client.Calls`."""

    limit: int
    state: ListedState | None = None


class WantPilots(_Message, frozen=True, tag="want-pilots"):
    """The states of the blocks of a client's Parsl provider, sent when they change. `ended`: blocks whose jobs have
    ended, so lost pilots never return. `most_pilots`: the pilots' limit (0: none).
    """

    blocks: dict[str, str]
    ended: tuple[str, ...] = ()
    most_pilots: int = 0


class ReleaseBlock(_Message, frozen=True, tag="release-block"):
    """Drain this block's pilots."""

    block: str


class EndSession(_Message, frozen=True, tag="end-session"):
    """The manager should cancel the client's open calls, stop the pilots, and exit."""

    reason: str = ""


# ---- from the factory


class BlockUpdate(_Message, frozen=True, tag="block-news"):
    """A block's new state at its batch system. `job`: the batch system's id. `expected_in_s`: seconds until its start
    (0: unknown). `loss`: why a running job ended. `no_node`: the batch system has no node on which it may run.
    """

    block: BlockId
    phase: BlockPhase
    job: str = ""
    reason: str = ""
    expected_in_s: float = 0.0
    loss: LossReason | None = None
    source: str = ""
    """The block's source, for a manager that may have lost the block with its journal."""
    cause: str = ""
    """Why the batch system holds the job, or last held it (`memory`)."""
    advice: str = ""
    """What the user can do to release the held job."""
    holds: int = 0
    no_node: bool = False


class SourceTrouble(_Message, frozen=True, tag="source-trouble"):
    """A batch system does not answer, or refuses commands. Empty `text`: it works again."""

    source: str
    text: str


# ---- from pilots


class DeviceFacts(msgspec.Struct, frozen=True):
    """A device of a pilot. `kind`: `cpu`, `NVIDIA A10`.

    `processes`: how many may use it at once (0: any number). `process_bytes`: its memory overhead per process. `fault`:
    why nothing may be loaded on it. `spare`: True for cores that the GPUs do not need, for contexts that name them in
    `kinds`. `island`: a number that devices with a fast link (NVLink, else one NUMA node) share; 0 = unknown.
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
    """A library in a pilot's hello, with its calls in order. `reserved_bytes`: per device. `memory_bytes`,
    `device_bytes`: measured on host and device. `slots`: 0 if unknown, or stated in the recipe. `cache`: as in
    `LibraryReady`.

    `sleeps`: True if its context can sleep. `asleep`: True if it sleeps, or is told to. `awake_bytes`: its reservation
    per device before it slept. `host_bytes`: reserved host memory of a sleeping context.
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
    """A pilot joins, or reconnects and reports its state. `number`: the count of its hellos. `ends_in_s`: remaining
    walltime (0: no limit).

    `peer`: the `host:port` at which it serves objects. Pilots with the same `cache` share a cache. `acknowledged`: it
    no longer has its frames up to this number. `troubles`: faults of the job's devices (a lost GPU). `lacks`: a missing
    requirement of the site; the manager then loads nothing there. `node`: its node's name in the batch system.

    `sleeper_bytes`: host memory for sleeping contexts of GPUs.

    A manager that lost the end of its journal needs `recipes`, `faults`, and `last_library`, the highest library number
    received.
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
    """Its objects are cached, but another library occupies the memory or the device."""
    STARTING = "starting"
    LOADING = "loading"
    WAKING = "waking"


class LibraryUpdate(_Message, frozen=True, tag="library-news"):
    """A library that is not ready has entered a phase, or printed a new last `line`."""

    library: LibraryId
    phase: LibraryPhase
    line: str = ""


class LibraryReady(_Message, frozen=True, tag="library-ready"):
    """A library has loaded. `resident_bytes`, `peak_bytes`: host memory. `slots`: concurrent calls (0: as in the
    recipe). `cache`: a language model's memory by cached tokens (None: another context). `sleeps`: True if its context
    can sleep.
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
    """A library sleeps. `device_memory_bytes`: its reservation per device, and `host_bytes` its reservation of host
    memory, both as measured. `sleep_s`: how long its context took.
    """

    library: LibraryId
    device_memory_bytes: int
    host_bytes: int = 0
    sleep_s: float = 0.0


class LibraryAwake(_Message, frozen=True, tag="awake"):
    """A library serves calls again (`wake_s`: how long its context took to wake), or refuses to sleep (`refused`: why).
    `device_memory_bytes`: its reservation per device.
    """

    library: LibraryId
    device_memory_bytes: int
    wake_s: float = 0.0
    refused: str = ""


class LibraryGone(_Message, frozen=True, tag="library-gone"):
    """A library has retired, stopped, failed to load, or died.

    `running`: the calls that it was computing. `unstarted`: its other calls. `failure`: None if the manager ordered the
    end. `loading`: True if it was never ready. `cache_lacks_bytes`: bytes that other libraries would have to release in
    the pilot's cache.
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
    """A library returns unstarted calls by order, or a pilot refuses calls (`refused`: why). `need_function`: True if
    the pilot no longer has the function. `required_bytes`: the reservation per device with which the library could
    accept the call (0: refused for another reason). `over_s`: seconds by which a decode step of each engine on the
    device would exceed the time per output token (0: refused for another reason). `case`: of a refused offer.
    """

    library: LibraryId
    calls: tuple[CallId, ...]
    refused: str = ""
    need_function: bool = False
    required_bytes: int = 0
    over_s: float = 0.0
    case: RefusalCase | None = None


class OfferAccepted(_Message, frozen=True, tag="accepted"):
    """A library accepted an offered call on the condition that the libraries `preempts` end. `reserve_bytes`: as in the
    offer.
    """

    library: LibraryId
    call: CallId
    preempts: tuple[LibraryId, ...]
    reserve_bytes: int = 0


class CallsProgress(_Message, frozen=True, tag="progress"):
    library: LibraryId
    reports: list[CallProgress]


class CallYielded(_Message, frozen=True, tag="yielded", gc=False):
    """Pieces of a running call (`to_agent.Yielded`). The pilot keeps them until they are acknowledged, and sends them
    again after each welcome. This message is never numbered or in the journal.
    """

    library: LibraryId
    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class CallEvicted(_Message, frozen=True, tag="evicted"):
    """A running call was stopped by order. `progress.state` lets it resume elsewhere."""

    library: LibraryId
    progress: CallProgress


class GangMeets(_Message, frozen=True, tag="gang-meets"):
    """Rank 0 of a gang waits for other ranks at this `host:port`."""

    library: LibraryId
    call: CallId
    address: str


class LibraryResized(_Message, frozen=True, tag="resized"):
    """A library's new reservation per device. `measured`: True if measured without an order. `ordered_bytes`: the size
    in the order (-1: unknown).
    """

    library: LibraryId
    device_memory_bytes: int
    measured: bool = False
    ordered_bytes: int = -1


class LibraryBatch(_Message, frozen=True, tag="batch"):
    """How full the batch of an engine is, and its step times since the last report. Sent at most every 10 s."""

    library: LibraryId
    load: EngineLoad
    times: StepTimes = StepTimes()


class LibraryUse(msgspec.Struct, frozen=True, array_like=True):
    """A library's measured use of memory and processors. `cpu_s`: in total."""

    library: LibraryId
    memory_bytes: int
    device_bytes: int = 0
    cpu_s: float = 0.0


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    libraries: tuple[LibraryUse, ...] = ()
    cache_bytes: int = 0
    refused_frames: int = 0


class WantObjects(_Message, frozen=True, tag="want-objects"):
    """Objects that a pilot lacks; answered with `to_pilot.FetchObject`."""

    objects: tuple[ObjectRef, ...]


class ObjectArrival(msgspec.Struct, frozen=True):
    """An object that a pilot has cached, with the bytes from origin and peers."""

    name: str
    size_bytes: int
    origin_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


class ObjectsHere(_Message, frozen=True, tag="objects-here"):
    arrivals: tuple[ObjectArrival, ...]


class ObjectsGone(_Message, frozen=True, tag="objects-gone"):
    """Objects that have left a pilot's cache, or are no longer needed there."""

    names: tuple[str, ...]


class FetchFailed(_Message, frozen=True, tag="fetch-failed"):
    """A failed fetch of an object. `peers`: pilots that did not answer, hung, or sent wrong bytes. `origin`: True if
    its origin could not be read.
    """

    name: str
    peers: tuple[PilotId, ...] = ()
    origin: bool = False
    reason: str = ""


class DeviceFault(_Message, frozen=True, tag="device-fault"):
    """A device failed its probe. Empty `reason`: it works again."""

    device: DeviceId
    reason: str


class WalltimeUpdate(_Message, frozen=True, tag="walltime-news"):
    """The batch system has changed the pilot's walltime. (Another hello would revoke orders sent since.)"""

    ends_in_s: float


class SnapshotHere(_Message, frozen=True, tag="snapshot-here"):
    """A library has written its loaded context as an object for faster loads. `form`: dtype and layout."""

    recipe: RecipeKey
    form: str
    object: ObjectRef
    manifest: bytes = b""
    made_s: float = 0.0


class PilotLeaving(_Message, frozen=True, tag="leaving"):
    """A pilot exits and has returned its calls. `loss`: the reason (None: the manager, walltime or idleness)."""

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
