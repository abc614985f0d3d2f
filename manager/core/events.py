"""Events and commands of the manager, and the subjects of advice.

Each event is journalled with its time; replaying them gives the same state. A shell carries commands out after their
events are in the journal.
"""

from __future__ import annotations

import msgspec

from stoker.contexts.step_times import StepTimes
from stoker.protocol import to_client, to_manager, to_pilot
from stoker.protocol.blocks import LossReason, PilotEnd, Source
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey


class OfContext(msgspec.Struct, frozen=True, array_like=True, tag="context"):
    """The cost of a context: its loads and memory."""

    recipe: RecipeKey


class OfFunction(msgspec.Struct, frozen=True, array_like=True, tag="function"):
    """The cost of a function's calls on a context."""

    function: FunctionKey
    recipe: RecipeKey


class OfFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Whose fault a failed call was, or a failed load (`call` -1)."""

    pilot: PilotId
    library: LibraryId
    call: CallId
    devices: tuple[DeviceId, ...] = ()


class OfPace(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """How fast a running call progresses, by its output."""

    library: LibraryId
    call: CallId


About = OfContext | OfFunction | OfFailure | OfPace


# ---- events
class _Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class FromClient(_Event, frozen=True, array_like=True, tag="c", gc=False):
    """A frame of a client. `sequence` 0 = not numbered."""

    client: ClientId
    sequence: int
    messages: list[to_manager.FromClient]


class FromPilot(_Event, frozen=True, array_like=True, tag="p", gc=False):
    """A frame of a pilot. `sequence` 0 = not numbered."""

    pilot: PilotId
    sequence: int
    messages: list[to_manager.FromPilot]


class PilotCut(_Event, frozen=True, array_like=True, tag="cut"):
    """The connection to a pilot broke; it may return within its lease."""

    pilot: PilotId


class PilotLost(_Event, frozen=True, array_like=True, tag="lost"):
    """A pilot did not return, or fell silent."""

    pilot: PilotId
    reason: str


class ClientGone(_Event, frozen=True, array_like=True, tag="client-gone"):
    """A client did not return."""

    client: ClientId


class TimerFired(_Event, frozen=True, array_like=True, tag="timer"):
    """A timer fired."""

    key: str


class ContextAdvice(msgspec.Struct, frozen=True, array_like=True):
    """Expected cost of a context on a device kind, in seconds and bytes; 0 = unknown.

    `sd`: standard deviations. `paces`: seconds for a unit of work by gang size; `meet_s`: until a gang has met.
    `slots`: calls at once. `steps`: step times of its engine.
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


class SessionDefined(_Event, frozen=True, array_like=True, tag="session"):
    """The session's sources, and how long pilots wait for an absent manager (0 = unknown)."""

    sources: tuple[Source, ...] = ()
    lease_s: float = 0.0


class SessionKept(_Event, frozen=True, array_like=True, tag="kept"):
    """The session outlives its clients (`stoker up`)."""


class SessionEnded(_Event, frozen=True, array_like=True, tag="ended"):
    """The shell ends the session, unused for the agreed time."""

    reason: str


class CostAdvice(msgspec.Struct, frozen=True, array_like=True, tag="cost"):
    """Expected cost by device kind (`""` = any)."""

    by_kind: dict[str, ContextAdvice]


class VerdictAdvice(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    """Whose fault a failure is, from 0 to 1 `sure`. `kind`: `user`, `framework` or `infrastructure`; `proof`: log
    lines."""

    kind: str
    component: str
    sure: float
    means: str
    proof: tuple[str, ...] = ()


class PaceAdvice(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """Progress of a call by its output; 0 = unknown. `slowed`: lost share of its best rate; `best_ago_s`: age of
    that rate."""

    done: float
    total: float
    unit: str
    per_s: float = 0.0
    left_s: float = 0.0
    slowed: float = 0.0
    best_ago_s: float = 0.0


Advice = CostAdvice | VerdictAdvice | PaceAdvice


class AdviceArrived(_Event, frozen=True, array_like=True, tag="advised"):
    """Advice on a subject. `source`: its origin, in words."""

    about: About
    advice: Advice
    source: str = "history"


class FormerAdvice(_Event, frozen=True, array_like=True, tag="advice"):
    """Advice on a context in journals of older versions."""

    recipe: RecipeKey
    by_kind: dict[str, ContextAdvice]
    source: str = "history"


class ManagerRestarted(_Event, frozen=True, array_like=True, tag="restarted"):
    """The manager restarted from its journal; `lost`: damaged bytes."""

    lost: int = 0


class FactoryTrouble(_Event, frozen=True, array_like=True, tag="factory"):
    """Why no factory has said hello for a while; empty: there is one."""

    reason: str


class Noticed(_Event, frozen=True, array_like=True, tag="noticed"):
    """A sentence of the shell for `stoker status`."""

    text: str


class EventRefused(_Event, frozen=True, array_like=True, tag="refused"):
    """An event of `role` and `name` made the core raise; the manager restarted without it."""

    role: str
    name: str
    sequence: int
    reason: str
    calls: list[CallId] = []


class FramesRefused(_Event, frozen=True, array_like=True, tag="frames-refused"):
    """Frames that the shell has refused, by kind."""

    counts: dict[str, int]


class RecordsLost(_Event, frozen=True, array_like=True, tag="records-lost"):
    """Bytes of the journal are damaged here."""

    bytes: int
    reason: str


class EndsKept(_Event, frozen=True, array_like=True, tag="ends-kept"):
    """The journal begins again with these ends."""

    ends: list[CallEnd]


Event = (
    FromClient | FromPilot | PilotCut | PilotLost | ClientGone | TimerFired | AdviceArrived | FormerAdvice
    | ManagerRestarted
    | SessionDefined | SessionKept | SessionEnded | FactoryTrouble | Noticed | EventRefused | RecordsLost | EndsKept
    | FramesRefused
)  # fmt: skip


# ---- commands
class ToPilot(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a pilot."""

    pilot: PilotId
    message: to_pilot.ToPilot


class ToClient(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a client."""

    client: ClientId
    message: to_client.ToClient


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Return `TimerFired(key)` at this time, replacing an earlier one."""

    at: float
    key: str


class AskAdvice(msgspec.Struct, frozen=True):
    """Ask about a subject; the answer is an `AdviceArrived`, later or never.

    `name`: function or context. `log`, `start`, `end`: the call's part of a log in bytes (`end` 0 = unknown). `said`:
    text of a failure.
    """

    about: About
    name: str = ""
    log: str = ""
    start: int = 0
    end: int = 0
    said: str = ""


class RecordLoad(msgspec.Struct, frozen=True):
    """Record the cost of a load, in seconds and bytes. `slots` 0 = unknown."""

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
    """Record calls and their total time since the last record."""

    recipe: RecipeKey
    function: str
    kind: str
    calls: int
    run_s: float
    items: int = 0


class RecordPace(msgspec.Struct, frozen=True):
    """Record the seconds of a unit of work for a gang size."""

    recipe: RecipeKey
    kind: str
    size: int
    pace_s: float


class RecordWait(msgspec.Struct, frozen=True):
    """Record a block's seconds in the queue and until its first pilot, and that pilot's devices."""

    source: str
    wait_s: float
    boot_s: float
    kind: str
    devices: int
    memory_bytes: int


class RecordStay(msgspec.Struct, frozen=True):
    """Record how long a pilot of a source stayed, and its end."""

    source: str
    stay_s: float
    end: PilotEnd
    loss: LossReason | None = None


class RecordPilots(msgspec.Struct, frozen=True):
    """Record how many pilots of a source are here."""

    source: str
    pilots: int


class DiscardObject(msgspec.Struct, frozen=True):
    """Remove the file of an unwanted result."""

    path: str


class EndManager(msgspec.Struct, frozen=True):
    """The session is over: send what is left, and exit."""

    reason: str


class RecordSteps(msgspec.Struct, frozen=True):
    """Record step times of a model's engine."""

    recipe: RecipeKey
    kind: str
    times: StepTimes


Record = RecordLoad | RecordRuns | RecordPace | RecordSteps | RecordWait | RecordStay | RecordPilots
Command = ToPilot | ToClient | SetTimer | AskAdvice | Record | DiscardObject | EndManager


# ---- messages of the advisor
LONGEST_MESSAGE = 65_536  # Longer ones are not sent


class Answer(msgspec.Struct, frozen=True):
    """The advisor's answer to a question; None: it found nothing."""

    about: About
    found: AdviceArrived | None


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(AskAdvice).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
