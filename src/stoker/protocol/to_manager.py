"""Messages of clients, the factory and pilots to the manager. The core gets each with its proven sender."""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec, Failure, ListedState
from stoker.protocol.ids import BlockId, CallId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- from clients


class ClientHello(_Message, frozen=True, tag="client-hello"):
    """A client joins or reconnects. `received`: the results that it has. An `observer` submits no calls; the `factory`
    carries out orders for blocks. It has dropped its frames up to `acknowledged`. `number`: from an earlier welcome, or
    -1."""

    protocol: int
    session: str
    received: int = 0
    observer: bool = False
    factory: bool = False
    acknowledged: int = 0
    number: int = -1


class Resubmitted(_Message, frozen=True, tag="resubmitted"):
    """The client has submitted all its open calls again (`ClientWelcome.again`), and waits for no others."""


class DefineRecipe(_Message, frozen=True, tag="recipe"):
    """A context recipe that calls may name from now on."""

    recipe: Recipe


class DefineManifest(_Message, frozen=True, tag="manifest"):
    """The digests of an object's parts (`stoker.contexts.manifest`)."""

    object: str
    manifest: bytes


class DefineFunction(_Message, frozen=True, tag="function"):
    """A function that calls may name from now on. `blob`: its cloudpickle; `place`: see `to_pilot.FunctionBlob`."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""


class Submit(_Message, frozen=True, tag="submit"):
    """Calls of one function on one context, in running order.

    `due_in_s`: seconds until their deadline, negative if it has passed; None = no deadline, or one in `options`. Client
    and manager have different clocks.
    """

    function: FunctionKey
    recipe: RecipeKey
    calls: list[CallSpec]
    options: CallOptions = CallOptions()
    due_in_s: float | None = None


class MapReport(_Message, frozen=True, tag="map"):
    """The progress of a `stoker.map`. `map`: its number among the client's; `name`: its function's.

    `total` and `done` count items (-1 = unknown), `kept` those with an earlier run's result. `unsent`: calls on
    `context` that are still to be submitted (-1 = unknown).
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
    """The client no longer waits for these calls. Stop the running ones if `running`, else drop their results."""

    calls: list[CallId]
    running: bool = False


class Received(_Message, frozen=True, tag="received"):
    """The client holds its first `total` results. The manager may forget them, and the `unused` functions once no open
    call needs them: the client defines one again before it uses it."""

    total: int
    unused: tuple[FunctionKey, ...] = ()


class PiecesTaken(_Message, frozen=True, tag="pieces-taken"):
    """The client has the first `upto` pieces of this run of a call. `again`: it asks for later ones again. Never
    numbered, and not in the journal."""

    call: CallId
    run: int
    upto: int
    again: bool = False


class AskStatus(_Message, frozen=True, tag="ask-status"):
    """Answered with `to_client.Status`."""


class AskStory(_Message, frozen=True, tag="ask-story"):
    """`subject`: a call, pilot, library or context as people write it. Answered with `to_client.Story`."""

    subject: str


class AskCalls(_Message, frozen=True, tag="ask-calls"):
    """Up to `limit` calls of each state, or of `state` alone. Answered with `to_client.Calls`."""

    limit: int
    state: ListedState | None = None


class WantPilots(_Message, frozen=True, tag="want-pilots"):
    """The state of each block of the client's provider, for `status`; sent when it has changed. `ended`: blocks whose
    job is over: no lost pilot of theirs returns. `most_pilots`: at once, 0 = any number."""

    blocks: dict[str, str]
    ended: tuple[str, ...] = ()
    most_pilots: int = 0


class ReleaseBlock(_Message, frozen=True, tag="release-block"):
    """Drain the pilots of this block."""

    block: str


class EndSession(_Message, frozen=True, tag="end-session"):
    """The client is done: cancel its open calls, let pilots end, and exit."""

    reason: str = ""


# ---- from the factory


class BlockUpdate(_Message, frozen=True, tag="block-news"):
    """The state of a block at its batch system, sent when it has changed. `job`: the batch system's id.
    `expected_in_s`: until its start, 0 = unknown. `loss`: why a running job has ended."""

    block: BlockId
    phase: BlockPhase
    job: str = ""
    reason: str = ""
    expected_in_s: float = 0.0
    loss: LossReason | None = None
    source: str = ""
    """For a manager that may have lost the block with its journal."""
    cause: str = ""
    """Why the batch system holds the job, or held it last (`memory`)."""
    advice: str = ""
    """The remedy for the hold."""
    holds: int = 0


class SourceTrouble(_Message, frozen=True, tag="source-trouble"):
    """A batch system does not answer or refuses. An empty `text`: it works again."""

    source: str
    text: str


# ---- from pilots


class DeviceFacts(msgspec.Struct, frozen=True):
    """One device: its kind (`cpu`, `NVIDIA A10`), memory and cores.

    `processes`: how many may use it at once (0 = any number). `process_bytes`: memory that it takes for each, in
    addition to what the process allocates. `fault`: why nothing may be loaded on it. `spare`: cores left by the pilot's
    GPUs, only for contexts whose `kinds` name them.
    """

    device: DeviceId
    kind: str
    memory_bytes: int
    cores: int = 1
    speed: float = 1.0
    processes: int = 0
    process_bytes: int = 0
    fault: str = ""
    spare: bool = False

    @property
    def on_host(self) -> bool:
        return self.kind.startswith("cpu")


class LibraryFacts(msgspec.Struct, frozen=True):
    """A library in a pilot's hello, with its calls in order. `reserved_bytes`: per device; `memory_bytes`,
    `device_bytes`: measured on host and device. `slots`: concurrent calls; 0: as the recipe says, or unknown."""

    library: LibraryId
    recipe: RecipeKey
    devices: tuple[DeviceId, ...]
    ready: bool
    calls: tuple[CallId, ...] = ()
    reserved_bytes: int = 0
    memory_bytes: int = 0
    device_bytes: int = 0
    slots: int = 0


class PilotHello(_Message, frozen=True, tag="pilot-hello"):
    """A pilot joins, or reconnects with its state. `ends_in_s`: its remaining walltime (0 = no limit).

    `peer`: the `host:port` at which it serves objects (empty: none). Pilots with the same `cache` share it. It has
    dropped its frames up to `acknowledged`. A manager that has lost a part of its journal needs the `recipes` of the
    libraries, `last_library`, the highest library number received, and `faults` of devices. `troubles`: faults of the
    job's devices (a lost GPU). `lacks`: what the site requires and the node lacks, so that nothing may be loaded.
    `number`: the count of its hellos.
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
    FETCHING = "fetching"
    WAITING = "waiting for room"
    """Its objects are there; another library holds the memory or the place."""
    STARTING = "starting"
    LOADING = "loading"


class LibraryUpdate(_Message, frozen=True, tag="library-news"):
    """A library that is not ready has entered a phase, or printed another last `line` in it."""

    library: LibraryId
    phase: LibraryPhase
    line: str = ""


class LibraryReady(_Message, frozen=True, tag="library-ready"):
    """A library serves calls. `resident_bytes`, `peak_bytes`: on the host. `slots`: calls at once; 0: as its recipe
    says."""

    library: LibraryId
    start_s: float
    load_s: float
    resident_bytes: int = 0
    peak_bytes: int = 0
    device_bytes: int = 0
    fetch_s: float = 0.0
    slots: int = 0


class LibraryGone(_Message, frozen=True, tag="library-gone"):
    """A library has ended: retired, stopped, failed to load, or died.

    `running`: the calls that it was computing; `unstarted`: its other calls. `failure`: None if it ended by order.
    `loading`: it was never ready. `cache_lacks_bytes`: bytes that other libraries would have to release in the pilot's
    cache for its objects.
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
    """Calls that a library gives back unstarted by order, or that a pilot refuses for a reason. `need_function`: the
    pilot no longer has the function. `required_bytes`: the memory per device that the library would need to take the
    call too; 0 = refused for another reason."""

    library: LibraryId
    calls: tuple[CallId, ...]
    refused: str = ""
    need_function: bool = False
    required_bytes: int = 0


class CallsProgress(_Message, frozen=True, tag="progress"):
    library: LibraryId
    reports: list[CallProgress]


class CallYielded(_Message, frozen=True, tag="yielded", gc=False):
    """Pieces that a running call has yielded (`to_agent.Yielded`). Never numbered, and not in the journal. The pilot
    keeps them until they are acknowledged, and sends them again after each welcome."""

    library: LibraryId
    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class CallEvicted(_Message, frozen=True, tag="evicted"):
    """A running call was stopped by order; `progress.state` lets it resume elsewhere."""

    library: LibraryId
    progress: CallProgress


class GangMeets(_Message, frozen=True, tag="gang-meets"):
    """Rank 0 of a gang waits for the others at this `host:port`."""

    library: LibraryId
    call: CallId
    address: str


class LibraryResized(_Message, frozen=True, tag="resized"):
    """A library's reservation on each of its devices. `measured`: the pilot has measured this use, and it answers no
    order. `ordered_bytes`: the size in the order that this answers; -1: unknown."""

    library: LibraryId
    device_memory_bytes: int
    measured: bool = False
    ordered_bytes: int = -1


class LibraryBatch(_Message, frozen=True, tag="batch"):
    """The load of the engine's batch, and the times of its steps since the last such message. Sent at most every 10
    s."""

    library: LibraryId
    load: EngineLoad
    times: StepTimes = StepTimes()


class LibraryUse(msgspec.Struct, frozen=True, array_like=True):
    """Measured use of a library; `cpu_s`: its processor time so far."""

    library: LibraryId
    memory_bytes: int
    device_bytes: int = 0
    cpu_s: float = 0.0


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    libraries: tuple[LibraryUse, ...] = ()
    cache_bytes: int = 0
    refused_frames: int = 0


class WantObjects(_Message, frozen=True, tag="want-objects"):
    """Objects that a pilot lacks. Answered with `to_pilot.FetchObject`, now or when a source is free."""

    objects: tuple[ObjectRef, ...]


class ObjectArrival(msgspec.Struct, frozen=True):
    """An object in a pilot's cache, and where its bytes came from."""

    name: str
    size_bytes: int
    origin_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


class ObjectsHere(_Message, frozen=True, tag="objects-here"):
    arrivals: tuple[ObjectArrival, ...]


class ObjectsGone(_Message, frozen=True, tag="objects-gone"):
    """Objects have left a pilot's cache, or are no longer wanted there."""

    names: tuple[str, ...]


class FetchFailed(_Message, frozen=True, tag="fetch-failed"):
    """`peers` could not be reached, hung, or served wrong bytes. `origin`: the pilot could not read the object's
    origin."""

    name: str
    peers: tuple[PilotId, ...] = ()
    origin: bool = False
    reason: str = ""


class DeviceFault(_Message, frozen=True, tag="device-fault"):
    """A device failed its probe. An empty `reason`: it works again."""

    device: DeviceId
    reason: str


class WalltimeUpdate(_Message, frozen=True, tag="walltime-news"):
    """The batch system has told the pilot another walltime. A second hello would revoke the manager's orders since the
    first."""

    ends_in_s: float


class SnapshotHere(_Message, frozen=True, tag="snapshot-here"):
    """A library has written its loaded context as an object, from which others load faster. `form`: dtype and
    layout."""

    recipe: RecipeKey
    form: str
    object: ObjectRef
    manifest: bytes = b""
    made_s: float = 0.0


class PilotLeaving(_Message, frozen=True, tag="leaving"):
    """A pilot ends in good order, and has given back its calls. `loss`: why, unless the manager, its walltime or
    idleness ends it."""

    reason: str
    loss: LossReason | None = None


FromClient = (
    ClientHello | DefineRecipe | DefineManifest | DefineFunction | Submit | Cancel | Received | AskStatus | AskStory
    | AskCalls | WantPilots | ReleaseBlock | EndSession | BlockUpdate | SourceTrouble | Resubmitted | PiecesTaken
    | MapReport
)  # fmt: skip
FromPilot = (
    PilotHello | LibraryUpdate | LibraryReady | LibraryGone | CallsEnded | CallsReturned | CallsProgress | CallEvicted
    | LibraryResized | Heartbeat | PilotLeaving | WantObjects | ObjectsHere | ObjectsGone | FetchFailed | DeviceFault
    | SnapshotHere | WalltimeUpdate | GangMeets | CallYielded | LibraryBatch
)  # fmt: skip
