"""Events and commands of the manager, and the subjects of advice.

The journal stores each event and its time before the manager carries out the commands. So a replay of the journal
gives the same state.
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
    """Subject of advice: the load time and the memory of a context."""

    recipe: RecipeKey


class OfFunction(msgspec.Struct, frozen=True, array_like=True, tag="function"):
    """Subject of advice: the run time of a function's calls on a context."""

    function: FunctionKey
    recipe: RecipeKey


class OfFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Subject of advice: the cause of a failed call, or of a failed load (`call` is -1)."""

    pilot: PilotId
    library: LibraryId
    call: CallId
    devices: tuple[DeviceId, ...] = ()


class OfPace(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """Subject of advice: the progress of a running call, read from its output."""

    library: LibraryId
    call: CallId


About = OfContext | OfFunction | OfFailure | OfPace


# ---- events
class _Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class FromClient(_Event, frozen=True, array_like=True, tag="c", gc=False):
    """Messages that a client has sent together. `sequence`: number of this frame; 0 = the frame has no number."""

    client: ClientId
    sequence: int
    messages: list[to_manager.FromClient]


class FromPilot(_Event, frozen=True, array_like=True, tag="p", gc=False):
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
    """Expected times and memory of a context on a kind of device; 0 = unknown.

    `paces`: seconds per unit of work, by number of ranks of a gang. `meet_s`: seconds until all ranks are connected.
    `slots`: concurrent calls of a library. `steps`: step times of the inference engine. `speed`: relative to the
    fastest device kind. `cache`: memory that cached tokens need.
    """

    load_s: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    run_s: float = 0.0
    paces: dict[int, float] = {}
    meet_s: float = 0.0
    slots: int = 0
    steps: StepTimes | None = None
    speed: float = 0.0
    cache: TokenCache | None = None


class SessionDefined(_Event, frozen=True, array_like=True, tag="session"):
    """The batch systems (sources) of the session. `lease_s`: seconds that pilots wait for a manager; 0 = unknown."""

    sources: tuple[Source, ...] = ()
    lease_s: float = 0.0


class SessionKept(_Event, frozen=True, array_like=True, tag="kept"):
    """`stoker up` has started the session, so it continues without clients."""


class SessionEnded(_Event, frozen=True, array_like=True, tag="ended"):
    reason: str


class CostAdvice(msgspec.Struct, frozen=True, array_like=True, tag="cost"):
    """Expected times and memory of a context or function, by device kind. The key `""` means any kind."""

    by_kind: dict[str, ContextAdvice]


class VerdictAdvice(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    """The cause of a failure. `kind`: `user`, `framework` or `infrastructure`. `sure`: certainty from 0 to 1. `means`:
    explanation for users. `proof`: log lines.
    """

    kind: str
    component: str
    sure: float
    means: str
    proof: tuple[str, ...] = ()


class PaceAdvice(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """Progress that a running call has printed; 0 = unknown. `slowed`: share of its best rate that is lost, 0 to 1."""

    done: float
    total: float
    unit: str
    per_s: float = 0.0
    left_s: float = 0.0
    slowed: float = 0.0
    best_ago_s: float = 0.0


Advice = CostAdvice | VerdictAdvice | PaceAdvice


class AdviceArrived(_Event, frozen=True, array_like=True, tag="advised"):
    about: About
    advice: Advice
    source: str = "history"


class ManagerRestarted(_Event, frozen=True, array_like=True, tag="restarted"):
    """The manager restarted from its journal. `lost`: number of damaged bytes in the journal."""

    lost: int = 0


class FactoryTrouble(_Event, frozen=True, array_like=True, tag="factory"):
    """The factory, which submits batch jobs, started or failed. `reason`: why no factory runs; empty if one runs."""

    reason: str


class Noticed(_Event, frozen=True, array_like=True, tag="noticed"):
    """A message that `stoker status` shows."""

    text: str


class EventRefused(_Event, frozen=True, array_like=True, tag="refused"):
    """An event made the core raise an exception, so the manager restarted without it. `role`, `name`: its sender."""

    role: str
    name: str
    sequence: int
    reason: str
    calls: list[CallId] = []


class FramesRefused(_Event, frozen=True, array_like=True, tag="frames-refused"):
    counts: dict[str, int]


class RecordsLost(_Event, frozen=True, array_like=True, tag="records-lost"):
    """The journal has lost `bytes` bytes at the position of this event."""

    bytes: int
    reason: str


class NodesHeard(_Event, frozen=True, array_like=True, tag="nodes"):
    """Other sessions excluded nodes or allowed nodes again."""

    records: tuple[NodeRecord, ...]


class ProbeClaimed(_Event, frozen=True, array_like=True, tag="probe-claimed"):
    """The session may test a node, because no other session has tested it recently."""

    source: str
    node: str


class EndsKept(_Event, frozen=True, array_like=True, tag="ends-kept"):
    """Results of ended calls that were copied from the old journal into a new journal."""

    ends: list[CallEnd]


Event = (
    FromClient | FromPilot | PilotCut | PilotLost | ClientGone | TimerFired | AdviceArrived | ManagerRestarted
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
    """Deliver `TimerFired(key)` at the time `at`. A later `SetTimer` with the same key replaces this timer."""

    at: float
    key: str


class AskAdvice(msgspec.Struct, frozen=True):
    """Ask the advisor a question. The answer is the event `AdviceArrived`. It may never arrive.

    `name`: name of the function or context. `log`, `start`, `end`: file and byte range of the call's output (`end` 0 =
    unknown). `said`: text of the failure.
    """

    about: About
    name: str = ""
    log: str = ""
    start: int = 0
    end: int = 0
    said: str = ""


class RecordLoad(msgspec.Struct, frozen=True):
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
    """Record the number and total run time of a function's calls since the last record."""

    recipe: RecipeKey
    function: str
    kind: str
    calls: int
    run_s: float
    items: int = 0


class RecordPace(msgspec.Struct, frozen=True):
    """Record the seconds per unit of work of gang calls that run on `size` libraries."""

    recipe: RecipeKey
    kind: str
    size: int
    pace_s: float


class RecordSpeed(msgspec.Struct, frozen=True):
    """Record the ratio of the run times of equal calls on two device kinds."""

    recipe: RecipeKey
    kind: str
    other: str
    ratio: float


class RecordWait(msgspec.Struct, frozen=True):
    """Record how long a batch job was queued, and how long its first pilot then took to join."""

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
    source: str
    pilots: int


class RecordNode(msgspec.Struct, frozen=True):
    """Store the record of a node for all sessions."""

    record: NodeRecord


class ClaimProbe(msgspec.Struct, frozen=True):
    """Ask for permission to test a node if no session has tested it for `every_s` seconds (see `ProbeClaimed`)."""

    record: NodeRecord
    every_s: float


class DiscardObject(msgspec.Struct, frozen=True):
    """Remove the file of a result that no client needs any more."""

    path: str


class EndManager(msgspec.Struct, frozen=True):
    """Send the remaining messages, and then end the manager process."""

    reason: str


class RecordSteps(msgspec.Struct, frozen=True):
    recipe: RecipeKey
    kind: str
    times: StepTimes


Record = (
    RecordLoad | RecordRuns | RecordPace | RecordSpeed | RecordSteps | RecordWait | RecordStay | RecordPilots
    | RecordNode
)  # fmt: skip
Command = ToPilot | ToClient | SetTimer | AskAdvice | ClaimProbe | Record | DiscardObject | EndManager


# ---- messages of the advisor
LONGEST_MESSAGE = 65_536  # Maximum size in bytes of a message to the advisor. Longer messages are not sent


class Answer(msgspec.Struct, frozen=True):
    """The advisor's answer to a question. `found`: None if the advisor has no advice."""

    about: About
    found: AdviceArrived | None


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(AskAdvice).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
