"""Messages from clients, the factory and pilots to the manager."""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.inference.adapter import EngineLoad, TokenCache
from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.step_times import StepTimes
from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.protocol.calls import (
    CallEnd,
    CallOptions,
    CallProgress,
    CallSpec,
    Failure,
    ListedState,
    Message,
    RefusalCase,
)
from stoker.protocol.ids import BlockId, CallId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey

# ---- from clients


class ClientHello(Message, frozen=True, tag="client-hello"):
    """A client joins or reconnects. `observer`: True if the client submits no calls. `factory`: True if the client
    submits and cancels blocks. `received`: number of results that the client has received. `acknowledged`: number of
    the client's last frame that the manager acknowledged. `number`: the client's number from an earlier welcome, or -1.
    """

    protocol: int
    session: str
    received: int = 0
    observer: bool = False
    factory: bool = False
    acknowledged: int = 0
    number: int = -1


class Resubmitted(Message, frozen=True, tag="resubmitted"):
    """The client has resubmitted all its open calls (`ClientWelcome.again`)."""


class DefineRecipe(Message, frozen=True, tag="recipe"):
    recipe: Recipe


class DefineManifest(Message, frozen=True, tag="manifest"):
    """The digests of an object's parts (`stoker.contexts.manifest`)."""

    object: str
    manifest: bytes


class DefineFunction(Message, frozen=True, tag="function"):
    """A function as pickled bytes. `place`: see `to_pilot.FunctionBlob`."""

    key: FunctionKey
    name: str
    blob: bytes
    place: str = ""


class Submit(Message, frozen=True, tag="submit"):
    """Calls of one function with one context, in their order. `due_in_s`: seconds until their deadline (negative:
    missed; None: as in `options`)."""

    function: FunctionKey
    recipe: RecipeKey
    calls: list[CallSpec]
    options: CallOptions = CallOptions()
    due_in_s: float | None = None


class MapReport(Message, frozen=True, tag="map"):
    """The progress of a `stoker.map`, in items. `total`: -1 if unknown. `kept`: number of results from earlier runs.
    `unsent`: number of calls that the client will still submit (-1: unknown).
    """

    map: int
    name: str
    context: RecipeKey
    total: int = -1
    done: int = 0
    kept: int = 0
    unsent: int = -1
    over: bool = False


class Cancel(Message, frozen=True, tag="cancel"):
    """Cancel calls. `running`: True to stop running calls, False to let them run and drop their results."""

    calls: list[CallId]
    running: bool = False


class Received(Message, frozen=True, tag="received"):
    """The manager may delete the client's first `total` results, and the functions in `unused` when no open call needs
    them."""

    total: int
    unused: tuple[FunctionKey, ...] = ()


class PiecesTaken(Message, frozen=True, tag="pieces-taken"):
    """The client has received the first `upto` result pieces of run number `run` of a call. `again`: True to request
    later pieces again. The message has no frame number and is not in the journal.
    """

    call: CallId
    run: int
    upto: int
    again: bool = False


class AskStatus(Message, frozen=True, tag="ask-status"):
    """Request a `to_client.Status`."""


class AskStory(Message, frozen=True, tag="ask-story"):
    """Ask why a call, pilot, library or context is in its state."""

    subject: str


class AskCalls(Message, frozen=True, tag="ask-calls"):
    """Request up to `limit` calls in `state` (None: in each state)."""

    limit: int
    state: ListedState | None = None


class ParslBlockStates(Message, frozen=True, tag="want-pilots"):
    """The states of the blocks of a client's Parsl provider. `ended`: ended blocks, whose pilots will not reconnect.
    `most_pilots`: maximum number of pilots (0: no maximum).
    """

    blocks: dict[str, str]
    ended: tuple[str, ...] = ()
    most_pilots: int = 0


class ReleaseBlock(Message, frozen=True, tag="release-block"):
    """Drain the pilots of a block."""

    block: str


class EndSession(Message, frozen=True, tag="end-session"):
    """Cancel the client's open calls, stop the pilots, and exit."""

    reason: str = ""


# ---- from the factory


class BlockUpdate(Message, frozen=True, tag="block-news"):
    """The state of a block in its batch system. `expected_in_s`: seconds until the expected start of the job (0:
    unknown). `loss`: why the job ended while it ran. `source`: site of the block, for a manager that lost the end of
    its journal. `cause`, `advice`, `holds`: cause, remedy and number of the job's holds. `no_node`: no allowed node
    exists."""

    block: BlockId
    phase: BlockPhase
    job: str = ""
    reason: str = ""
    expected_in_s: float = 0.0
    loss: LossReason | None = None
    source: str = ""
    cause: str = ""
    advice: str = ""
    holds: int = 0
    no_node: bool = False


class SourceTrouble(Message, frozen=True, tag="source-trouble"):
    """A batch system does not answer, or refuses commands. `text`: the fault (empty: the batch system works again)."""

    source: str
    text: str


# ---- from pilots


class DeviceFacts(msgspec.Struct, frozen=True):
    """A device of a pilot. `kind`: for example `cpu` or `NVIDIA A10`. `processes`: maximum number of processes (0:
    any). `process_bytes`: memory overhead per process. `fault`: why no context may be loaded. `spare`: CPU cores that
    the GPUs do not need, for contexts that name this device kind. `island`: group of devices that share NVLink, or else
    a NUMA node (0: unknown)."""

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
    """A library in a pilot's hello, with its calls in order. `reserved_bytes`: reserved memory per device.
    `memory_bytes`, `device_bytes`: measured memory on host and device. `slots`: number of slots (0: unknown, or as in
    the recipe). `asleep`: True if the library sleeps or has the order to sleep. `awake_bytes`: reserved memory per
    device before the sleep. `host_bytes`: host memory reserved for a sleeping context.
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


class PilotHello(Message, frozen=True, tag="pilot-hello"):
    """A pilot joins, or reconnects and reports its state. `number`: number of this hello. `ends_in_s`: walltime left
    (0: no limit). `peer`: `host:port` at which the pilot serves objects. `cache`: id, equal for pilots that share a
    cache. `acknowledged`: the pilot's last frame that the manager acknowledged. `troubles`: faults of the job's
    devices. `lacks`: why the pilot cannot load contexts. `node`: name of the node in the batch system. `sleeper_bytes`:
    host memory for GPU contexts that sleep. A manager that lost the end of its journal needs `recipes`, `faults` and
    `last_library` (the highest library number that the pilot received)."""

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
    faults: dict[DeviceId, str] = msgspec.field(default_factory=dict)
    troubles: tuple[str, ...] = ()
    lacks: str = ""
    number: int = 0
    node: str = ""
    sleeper_bytes: int = 0


class LibraryPhase(enum.Enum):
    FETCHING = "fetching"
    WAITING = "waiting for room"
    """Another library occupies the memory or the device."""
    STARTING = "starting"
    LOADING = "loading"
    WAKING = "waking"


class LibraryUpdate(Message, frozen=True, tag="library-news"):
    """A library that is not ready has a new `phase`, or has printed a new `line`."""

    library: LibraryId
    phase: LibraryPhase
    line: str = ""


class LibraryReady(Message, frozen=True, tag="library-ready"):
    """A library has loaded its context. `slots`: number of slots (0: as in the recipe). `cache`: cache memory of a
    language model. `sleeps`: True if the library can sleep.
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


class LibraryAsleep(Message, frozen=True, tag="asleep"):
    """A library sleeps. Bytes are its new reservations, as measured. `sleep_s`: seconds until the library slept."""

    library: LibraryId
    device_memory_bytes: int
    host_bytes: int = 0
    sleep_s: float = 0.0


class LibraryAwake(Message, frozen=True, tag="awake"):
    """A library serves calls again after `wake_s` seconds, or did not go to sleep (`refused`: the reason)."""

    library: LibraryId
    device_memory_bytes: int
    wake_s: float = 0.0
    refused: str = ""


class LibraryGone(Message, frozen=True, tag="library-gone"):
    """A library and its calls are gone: the library has retired, stopped, failed to load, or died. `failure`: None if
    the manager ordered the end. `loading`: True if the library was never ready. `cache_lacks_bytes`: bytes in the
    pilot's cache that other libraries must release before this library can start.
    """

    library: LibraryId
    failure: Failure | None = None
    loading: bool = False
    running: tuple[CallId, ...] = ()
    unstarted: tuple[CallId, ...] = ()
    cache_lacks_bytes: int = 0


class CallsEnded(Message, frozen=True, tag="ended", gc=False):
    library: LibraryId
    ends: list[CallEnd]


class CallsReturned(Message, frozen=True, tag="returned"):
    """A library returns unstarted calls as ordered, or a pilot refuses calls (`refused`: the reason). `need_function`:
    the pilot lacks the function. `required_bytes`: reservation per device that would suffice. `over_s`: seconds by
    which a decode step of each engine on the device exceeds the time per output token. `case`: why an offer was
    refused."""

    library: LibraryId
    calls: tuple[CallId, ...]
    refused: str = ""
    need_function: bool = False
    required_bytes: int = 0
    over_s: float = 0.0
    case: RefusalCase | None = None


class OfferAccepted(Message, frozen=True, tag="accepted"):
    """A library accepts an offered call, on the condition that the libraries in `preempts` end."""

    library: LibraryId
    call: CallId
    preempts: tuple[LibraryId, ...]
    reserve_bytes: int = 0


class CallsProgress(Message, frozen=True, tag="progress"):
    library: LibraryId
    reports: list[CallProgress]


class CallYielded(Message, frozen=True, tag="yielded", gc=False):
    """Pieces of the result of a running call (`to_agent.Yielded`). The message has no frame number and is not in the
    journal. The pilot keeps the pieces until they are acknowledged, and resends them after each welcome."""

    library: LibraryId
    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class CallEvicted(Message, frozen=True, tag="evicted"):
    """The pilot stopped a running call by order. The call can resume elsewhere from `progress.state`."""

    library: LibraryId
    progress: CallProgress


class GangMeets(Message, frozen=True, tag="gang-meets"):
    """Rank 0 of a gang waits for the other ranks at `address` (`host:port`)."""

    library: LibraryId
    call: CallId
    address: str


class LibraryResized(Message, frozen=True, tag="resized"):
    """The new reservation of a library per device. `measured`: True if a measurement caused the change, not an order.
    `ordered_bytes`: the ordered reservation (-1: unknown)."""

    library: LibraryId
    device_memory_bytes: int
    measured: bool = False
    ordered_bytes: int = -1


class LibraryEngineReport(Message, frozen=True, tag="batch"):
    """The load of a library's inference engine, and the engine's step times since the last report."""

    library: LibraryId
    load: EngineLoad
    times: StepTimes = StepTimes()


class LibraryUse(msgspec.Struct, frozen=True, array_like=True):
    library: LibraryId
    memory_bytes: int
    device_bytes: int = 0
    cpu_s: float = 0.0


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    libraries: tuple[LibraryUse, ...] = ()
    cache_bytes: int = 0
    refused_frames: int = 0


class WantObjects(Message, frozen=True, tag="want-objects"):
    """Request objects that the pilot lacks. The manager answers with `to_pilot.FetchObject`."""

    objects: tuple[ObjectRef, ...]


class ObjectArrival(msgspec.Struct, frozen=True):
    """An object that a pilot has cached, with the number of bytes read from the origin and from other pilots."""

    name: str
    size_bytes: int
    origin_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


class ObjectsCached(Message, frozen=True, tag="objects-here"):
    arrivals: tuple[ObjectArrival, ...]


class ObjectsGone(Message, frozen=True, tag="objects-gone"):
    """Objects that a pilot no longer has or needs."""

    names: tuple[str, ...]


class FetchFailed(Message, frozen=True, tag="fetch-failed"):
    """A fetch of an object failed. `peers`: pilots that did not send it. `origin`: True if its origin is unreadable."""

    name: str
    peers: tuple[PilotId, ...] = ()
    origin: bool = False
    reason: str = ""


class DeviceFault(Message, frozen=True, tag="device-fault"):
    """A device failed its probe. `reason`: the fault (empty: the device works again)."""

    device: DeviceId
    reason: str


class WalltimeUpdate(Message, frozen=True, tag="walltime-news"):
    """The batch system has changed the pilot's walltime. (The pilot sends no new hello, which would revoke orders.)"""

    ends_in_s: float


class SnapshotWritten(Message, frozen=True, tag="snapshot-here"):
    """A library has written a snapshot of its context. `form`: dtype and layout of the snapshot."""

    recipe: RecipeKey
    form: str
    object: ObjectRef
    manifest: bytes = b""
    made_s: float = 0.0


class PilotLeaving(Message, frozen=True, tag="leaving"):
    """A pilot has returned its calls and exits. `loss`: why the pilot is lost (None: the end was expected)."""

    reason: str
    loss: LossReason | None = None


FromClient = (
    ClientHello | DefineRecipe | DefineManifest | DefineFunction | Submit | Cancel | Received | AskStatus | AskStory
    | AskCalls | ParslBlockStates | ReleaseBlock | EndSession | BlockUpdate | SourceTrouble | Resubmitted | PiecesTaken
    | MapReport
)  # fmt: skip
FromPilot = (
    PilotHello | LibraryUpdate | LibraryReady | LibraryGone | CallsEnded | CallsReturned | OfferAccepted | CallsProgress
    | CallEvicted | LibraryResized | Heartbeat | PilotLeaving | WantObjects | ObjectsCached | ObjectsGone | FetchFailed
    | DeviceFault | SnapshotWritten | WalltimeUpdate | GangMeets | CallYielded | LibraryEngineReport | LibraryAsleep
    | LibraryAwake
)  # fmt: skip
