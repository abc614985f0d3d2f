"""Events and commands of the manager, and the subjects of advice.

What advice can be about. A question names its subject, and the answer names it again: it may come much later.

What can happen to the manager. Each is journalled with its time; replaying them gives the same state.

What the manager wants done. A shell carries commands out after the events that caused them are in the journal.

The messages between manager and advisor: one a datagram, on a socket pair that keeps them apart.
"""

from __future__ import annotations

import msgspec

from stoker.contexts.step_times import StepTimes
from stoker.protocol import to_client, to_manager, to_pilot
from stoker.protocol.blocks import LossReason, PilotEnd, Source
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey


class OfContext(msgspec.Struct, frozen=True, array_like=True, tag="context"):
    """What a context costs: its loads and its memory."""

    recipe: RecipeKey


class OfFunction(msgspec.Struct, frozen=True, array_like=True, tag="function"):
    """What calls of a function on a context cost."""

    function: FunctionKey
    recipe: RecipeKey


class OfFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Whose fault it was that a call failed, or a load (`call` is -1). `devices`: those of the library."""

    pilot: PilotId
    library: LibraryId
    call: CallId
    devices: tuple[DeviceId, ...] = ()


class OfPace(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """How fast a running call gets on, by what it prints."""

    library: LibraryId
    call: CallId


About = OfContext | OfFunction | OfFailure | OfPace


# ---- events
class _Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class FromClient(_Event, frozen=True, array_like=True, tag="c", gc=False):
    """A frame from a client. The socket proved who sent it. `sequence` 0 = not numbered."""

    client: ClientId
    sequence: int
    messages: list[to_manager.FromClient]


class FromPilot(_Event, frozen=True, array_like=True, tag="p", gc=False):
    """A frame from a pilot. The socket proved who sent it. `sequence` 0 = not numbered."""

    pilot: PilotId
    sequence: int
    messages: list[to_manager.FromPilot]


class PilotCut(_Event, frozen=True, array_like=True, tag="cut"):
    """The connection to a pilot broke; it may come back within its lease."""

    pilot: PilotId


class PilotLost(_Event, frozen=True, array_like=True, tag="lost"):
    """A pilot did not come back, or fell silent: whatever it held is gone."""

    pilot: PilotId
    reason: str


class ClientGone(_Event, frozen=True, array_like=True, tag="client-gone"):
    """A client did not come back: nobody waits for its calls any more."""

    client: ClientId


class TimerFired(_Event, frozen=True, array_like=True, tag="timer"):
    """A timer that a policy asked for."""

    key: str


class ContextAdvice(msgspec.Struct, frozen=True, array_like=True):
    """What is believed of a context on a device kind. Seconds and bytes; 0 = not known. `sd` fields: uncertainty.
    `paces`: seconds for a unit of a call's work by the size of its gang (see `paces`); `meet_s`: what meeting takes,
    0 = not known. `slots`: calls that a library runs at once. `steps`: what the steps of its engine take, None if it
    has none or nobody has measured them."""

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
    """Where the session's pilots come from, as its site files say, and how long they wait for a manager that is gone
    (0 = unknown). It comes first, and again after a restart."""

    sources: tuple[Source, ...] = ()
    lease_s: float = 0.0


class SessionKept(_Event, frozen=True, array_like=True, tag="kept"):
    """The session is to outlive its clients (`stoker up`): it ends when somebody ends it."""


class SessionEnded(_Event, frozen=True, array_like=True, tag="ended"):
    """The shell ends the session: no program has used it for as long as it was told to wait."""

    reason: str


class CostAdvice(msgspec.Struct, frozen=True, array_like=True, tag="cost"):
    """What a context, or a function on it, is believed to cost, by device kind (`""` = any)."""

    by_kind: dict[str, ContextAdvice]


class VerdictAdvice(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    """Whose fault a failure is: `kind` is `user`, `framework` or `infrastructure`, `component` what failed in a word,
    `sure` from 0 to 1, `means` what happened in words. `proof`: the lines that show it."""

    kind: str
    component: str
    sure: float
    means: str
    proof: tuple[str, ...] = ()


class PaceAdvice(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """How far a call is by what it prints, in its own units; 0 = not said. `slowed`: how much slower it is now than at
    its best, as a share of its best rate, and 0 where that cannot be told; `best_ago_s`: how long ago it was seen at
    its best; `left_s`: seconds until its end."""

    done: float
    total: float
    unit: str
    per_s: float = 0.0
    left_s: float = 0.0
    slowed: float = 0.0
    best_ago_s: float = 0.0


Advice = CostAdvice | VerdictAdvice | PaceAdvice


class AdviceArrived(_Event, frozen=True, array_like=True, tag="advised"):
    """Advice on a subject that somebody asked about, or that history offers. `source`: where it comes from, in words
    for people."""

    about: About
    advice: Advice
    source: str = "history"


class FormerAdvice(_Event, frozen=True, array_like=True, tag="advice"):
    """Advice on a context, as journals have it that were written before there were other subjects."""

    recipe: RecipeKey
    by_kind: dict[str, ContextAdvice]
    source: str = "history"


class ManagerRestarted(_Event, frozen=True, array_like=True, tag="restarted"):
    """The manager came back from its journal: every pilot and client is cut until it says hello. `lost`: the number of
    damaged bytes in the journal (see `Past.lost`). The manager decides without them from here on."""

    lost: int = 0


class FactoryTrouble(_Event, frozen=True, array_like=True, tag="factory"):
    """No factory has said hello for a while, and why that may be; empty: there is one again."""

    reason: str


class Noticed(_Event, frozen=True, array_like=True, tag="noticed"):
    """The shell has something to tell the users of the session, such as a journal that was damaged: `status` shows
    it."""

    text: str


class EventRefused(_Event, frozen=True, array_like=True, tag="refused"):
    """An event made the core raise, for this reason; the manager was started again, and goes on without it. `role` and
    `name` say whose it was (a client's, a pilot's, a timer's), `calls` are those that it would have made."""

    role: str
    name: str
    sequence: int
    reason: str
    calls: list[CallId] = []


class FramesRefused(_Event, frozen=True, array_like=True, tag="frames-refused"):
    """The shell has refused frames, or could not answer questions, since it said so last: by kind, counted."""

    counts: dict[str, int]


class RecordsLost(_Event, frozen=True, array_like=True, tag="records-lost"):
    """So many bytes of the journal are damaged here: whatever peers said in them, each of them is asked anew."""

    bytes: int
    reason: str


class EndsKept(_Event, frozen=True, array_like=True, tag="ends-kept"):
    """The journal begins anew: of what was before it these ends are certain. Their clients may submit the calls
    again."""

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
    """Give `TimerFired(key)` back at this time; a later timer of the same key replaces it."""

    at: float
    key: str


class AskAdvice(msgspec.Struct, frozen=True):
    """Find out about a subject; nothing waits for the answer, an `AdviceArrived`. `name`: that of the function, as its
    runs are remembered, or of the context. `log`: where the library of a call writes, and the part of it that the call
    has written, in bytes (`end` is 0: not known). `said`: what a failure said."""

    about: About
    name: str = ""
    log: str = ""
    start: int = 0
    end: int = 0
    said: str = ""


class RecordLoad(msgspec.Struct, frozen=True):
    """Remember what a load cost on a device kind. Seconds and bytes. `slots`: calls that the library runs at once; 0:
    it did not say."""

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
    """Remember what calls cost: their number and total time on a device kind, since the last record. `items` were
    packed into them (one each, where they were not packed)."""

    recipe: RecipeKey
    function: str
    kind: str
    calls: int
    run_s: float
    items: int = 0


class RecordPace(msgspec.Struct, frozen=True):
    """Remember how long a unit of a call's work took gangs of a size on a device kind. Seconds."""

    recipe: RecipeKey
    kind: str
    size: int
    pace_s: float


class RecordWait(msgspec.Struct, frozen=True):
    """Remember how long a block waited in its source's queue, and from the start of its job until its first pilot came.
    Seconds; 0 for the second where the batch system had not said yet that it runs. And what devices that pilot has:
    their kind, their number, and the memory of each in bytes."""

    source: str
    wait_s: float
    boot_s: float
    kind: str
    devices: int
    memory_bytes: int


class RecordStay(msgspec.Struct, frozen=True):
    """Remember how long a pilot of a source was here, and how that ended; `loss`: why it was lost, if it was."""

    source: str
    stay_s: float
    end: PilotEnd
    loss: LossReason | None = None


class RecordPilots(msgspec.Struct, frozen=True):
    """Remember how many pilots of a source are here from now on."""

    source: str
    pilots: int


class DiscardObject(msgspec.Struct, frozen=True):
    """Remove the file of a result that nobody will read."""

    path: str


class EndManager(msgspec.Struct, frozen=True):
    """The session is over: send what is to be sent, and exit."""

    reason: str


class RecordSteps(msgspec.Struct, frozen=True):
    """Remember what steps of a model's engine took on a device kind."""

    recipe: RecipeKey
    kind: str
    times: StepTimes


Record = RecordLoad | RecordRuns | RecordPace | RecordSteps | RecordWait | RecordStay | RecordPilots
Command = ToPilot | ToClient | SetTimer | AskAdvice | Record | DiscardObject | EndManager


# ---- messages of the advisor
LONGEST_MESSAGE = 65_536  # Longer ones are not sent


class Answer(msgspec.Struct, frozen=True):
    """The answer to the question on a subject; None: nothing was found."""

    about: About
    found: AdviceArrived | None


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(AskAdvice).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
