"""What can happen to the manager. Each is journalled with its time; replaying them gives the same state."""

from __future__ import annotations

import msgspec

from stoker.contexts.step_times import StepTimes
from stoker.manager.core.subjects import About
from stoker.protocol import to_manager
from stoker.protocol.blocks import Source
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, ClientId, PilotId, RecipeKey


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
