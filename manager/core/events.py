"""Events and commands of the manager, and the subjects of advice.

Each event is written to the journal with its time, so a replay gives the same state. Commands run after their events
are in the journal.
"""

from __future__ import annotations

import msgspec

from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.step_times import StepTimes
from stoker.protocol import to_client, to_manager, to_pilot
from stoker.protocol.blocks import LossReason, NodeRecord, PilotEnd, Source
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey


class OfContext(msgspec.Struct, frozen=True, array_like=True, tag="context"):
    """Subject: the load time and memory of a context."""

    recipe: RecipeKey


class OfFunction(msgspec.Struct, frozen=True, array_like=True, tag="function"):
    """Subject: the cost of a function's calls on a context."""

    function: FunctionKey
    recipe: RecipeKey


class OfFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Subject: the cause of a failed call or load (`call` is -1 for a load)."""

    pilot: PilotId
    library: LibraryId
    call: CallId
    devices: tuple[DeviceId, ...] = ()


class OfPace(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """Subject: the progress of a running call, read from its output."""

    library: LibraryId
    call: CallId


About = OfContext | OfFunction | OfFailure | OfPace


# ---- events
class _Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class FromClient(_Event, frozen=True, array_like=True, tag="c", gc=False):
    """A frame from a client. `sequence`: frame number; 0 = not numbered."""

    client: ClientId
    sequence: int
    messages: list[to_manager.FromClient]


class FromPilot(_Event, frozen=True, array_like=True, tag="p", gc=False):
    """A frame from a pilot. `sequence`: frame number; 0 = not numbered."""

    pilot: PilotId
    sequence: int
    messages: list[to_manager.FromPilot]


class PilotCut(_Event, frozen=True, array_like=True, tag="cut"):
    """A pilot's connection broke. The pilot may reconnect within its lease."""

    pilot: PilotId


class PilotLost(_Event, frozen=True, array_like=True, tag="lost"):
    """A pilot did not reconnect in time, or sent no heartbeats."""

    pilot: PilotId
    reason: str


class ClientGone(_Event, frozen=True, array_like=True, tag="client-gone"):
    client: ClientId


class TimerFired(_Event, frozen=True, array_like=True, tag="timer"):
    key: str


class ContextAdvice(msgspec.Struct, frozen=True, array_like=True):
    """Expected cost of a context on a device kind, in seconds and bytes; 0 = unknown.

    `*_sd_s`: standard deviation. `paces`: seconds per unit of work, by gang size. `meet_s`: seconds until the ranks of
    a gang have connected. `slots`: concurrent calls. `steps`: step times of the engine. `speed`: relative to the
    fastest kind. `cache`: memory by cached tokens.
    """

    load_s: float = 0.0
    load_sd_s: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    run_s: float = 0.0
    run_sd_s: float = 0.0
    paces: dict[int, float] = {}
    meet_s: float = 0.0
    slots: int = 0
    steps: StepTimes | None = None
    speed: float = 0.0
    cache: TokenCache | None = None


class SessionDefined(_Event, frozen=True, array_like=True, tag="session"):
    """The sources of the session. `lease_s`: seconds that pilots wait for an absent manager (0 = unknown)."""

    sources: tuple[Source, ...] = ()
    lease_s: float = 0.0


class SessionKept(_Event, frozen=True, array_like=True, tag="kept"):
    """The session continues without clients (`stoker up`)."""


class SessionEnded(_Event, frozen=True, array_like=True, tag="ended"):
    """The server ends the session: it is unused, or `stoker down` ran."""

    reason: str


class CostAdvice(msgspec.Struct, frozen=True, array_like=True, tag="cost"):
    """Expected cost by device kind; the key `""` means any kind."""

    by_kind: dict[str, ContextAdvice]


class VerdictAdvice(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    """Cause of a failure. `kind`: `user`, `framework` or `infrastructure`. `sure`: confidence, 0 to 1. `proof`: log
    lines.
    """

    kind: str
    component: str
    sure: float
    means: str
    proof: tuple[str, ...] = ()


class PaceAdvice(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """Progress of a call, read from its output; 0 = unknown.

    `slowed`: relative loss since the best rate. `best_ago_s`: seconds since that rate.
    """

    done: float
    total: float
    unit: str
    per_s: float = 0.0
    left_s: float = 0.0
    slowed: float = 0.0
    best_ago_s: float = 0.0


Advice = CostAdvice | VerdictAdvice | PaceAdvice


class AdviceArrived(_Event, frozen=True, array_like=True, tag="advised"):
    """Advice on a subject. `source`: where the advice comes from."""

    about: About
    advice: Advice
    source: str = "history"


class FormerAdvice(_Event, frozen=True, array_like=True, tag="advice"):
    """Advice on a context in journals of older versions."""

    recipe: RecipeKey
    by_kind: dict[str, ContextAdvice]
    source: str = "history"


class ManagerRestarted(_Event, frozen=True, array_like=True, tag="restarted"):
    """The manager restarted from its journal. `lost`: damaged bytes in the journal."""

    lost: int = 0


class FactoryTrouble(_Event, frozen=True, array_like=True, tag="factory"):
    """Why no factory is connected; empty if a factory is connected."""

    reason: str


class Noticed(_Event, frozen=True, array_like=True, tag="noticed"):
    """A notice for `stoker status`."""

    text: str


class EventRefused(_Event, frozen=True, array_like=True, tag="refused"):
    """An event made the core raise, and the manager restarted without it. `role`, `name`: its sender."""

    role: str
    name: str
    sequence: int
    reason: str
    calls: list[CallId] = []


class FramesRefused(_Event, frozen=True, array_like=True, tag="frames-refused"):
    """Number of frames that the server refused, by kind."""

    counts: dict[str, int]


class RecordsLost(_Event, frozen=True, array_like=True, tag="records-lost"):
    """The journal has lost `bytes` bytes here."""

    bytes: int
    reason: str


class NodesHeard(_Event, frozen=True, array_like=True, tag="nodes"):
    """Nodes that other sessions excluded or allowed again."""

    records: tuple[NodeRecord, ...]


class ProbeClaimed(_Event, frozen=True, array_like=True, tag="probe-claimed"):
    """This session may probe a node; no other session probed it lately."""

    source: str
    node: str


class EndsKept(_Event, frozen=True, array_like=True, tag="ends-kept"):
    """A new journal begins with these call ends of the old journal."""

    ends: list[CallEnd]


Event = (
    FromClient | FromPilot | PilotCut | PilotLost | ClientGone | TimerFired | AdviceArrived | FormerAdvice
    | ManagerRestarted
    | SessionDefined | SessionKept | SessionEnded | FactoryTrouble | Noticed | EventRefused | RecordsLost | EndsKept
    | FramesRefused | NodesHeard | ProbeClaimed
)  # fmt: skip


# ---- commands
class ToPilot(msgspec.Struct, frozen=True, gc=False):
    pilot: PilotId
    message: to_pilot.ToPilot


class ToClient(msgspec.Struct, frozen=True, gc=False):
    client: ClientId
    message: to_client.ToClient


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Deliver `TimerFired(key)` at this time. Replaces an earlier timer."""

    at: float
    key: str


class AskAdvice(msgspec.Struct, frozen=True):
    """Ask the advisor a question. `AdviceArrived` follows later or never.

    `name`: function or context. `log`, `start`, `end`: log file, and byte range of the call's output (`end` 0 =
    unknown). `said`: text of a failure.
    """

    about: About
    name: str = ""
    log: str = ""
    start: int = 0
    end: int = 0
    said: str = ""


class RecordLoad(msgspec.Struct, frozen=True):
    """Record the cost of a load, in seconds and bytes. `slots`: 0 = unknown."""

    recipe: RecipeKey
    name: str
    kind: str
    start_s: float
    load_s: float
    resident_bytes: int
    peak_bytes: int
    device_bytes: int
    slots: int = 0


class RecordRuns(msgspec.Struct, frozen=True):
    """Record the number and total run time of calls since the last record."""

    recipe: RecipeKey
    function: str
    kind: str
    calls: int
    run_s: float
    items: int = 0


class RecordPace(msgspec.Struct, frozen=True):
    """Record the seconds per unit of work that gangs of `size` ranks need."""

    recipe: RecipeKey
    kind: str
    size: int
    pace_s: float


class RecordSpeed(msgspec.Struct, frozen=True):
    """Record the ratio of equal calls' run times on two device kinds."""

    recipe: RecipeKey
    kind: str
    other: str
    ratio: float


class RecordWait(msgspec.Struct, frozen=True):
    """Record a block's queue time, the time until its first pilot, and that pilot's devices."""

    source: str
    wait_s: float
    boot_s: float
    kind: str
    devices: int
    memory_bytes: int


class RecordStay(msgspec.Struct, frozen=True):
    """Record how long a pilot stayed connected, and how it ended."""

    source: str
    stay_s: float
    end: PilotEnd
    loss: LossReason | None = None


class RecordPilots(msgspec.Struct, frozen=True):
    """Record the number of connected pilots of a source."""

    source: str
    pilots: int


class RecordNode(msgspec.Struct, frozen=True):
    """Keep a node's record for later and other sessions."""

    record: NodeRecord


class ClaimProbe(msgspec.Struct, frozen=True):
    """Request to probe a node `every_s` seconds after its last probe. `ProbeClaimed` grants it."""

    record: NodeRecord
    every_s: float


class DiscardObject(msgspec.Struct, frozen=True):
    """Remove the file of an unwanted result."""

    path: str


class EndManager(msgspec.Struct, frozen=True):
    """Send the remaining messages, then exit."""

    reason: str


class RecordSteps(msgspec.Struct, frozen=True):
    recipe: RecipeKey
    kind: str
    times: StepTimes


Record = (
    RecordLoad
    | RecordRuns
    | RecordPace
    | RecordSpeed
    | RecordSteps
    | RecordWait
    | RecordStay
    | RecordPilots
    | RecordNode
)
Command = ToPilot | ToClient | SetTimer | AskAdvice | ClaimProbe | Record | DiscardObject | EndManager


# ---- messages of the advisor
LONGEST_MESSAGE = 65_536  # Maximum bytes of a message; longer messages are not sent


class Answer(msgspec.Struct, frozen=True):
    """An answer of the advisor. `found`: the advice, or None."""

    about: About
    found: AdviceArrived | None


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(AskAdvice).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
