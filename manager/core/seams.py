"""The seams: what policies are asked and may answer, and wishes of calls that they honour.

Three questions that policies answer, a fourth that the pilot answers, and the actions that policies answer with.

A policy is asked through one of these Protocols, over a read-only view, and answers with actions; it never sends and
never changes anything. Where an answer is an iterable of actions it may be a generator, which is asked for the next
action when the one before has been carried out: it sees in the view what that has changed. The hot path is asked one
call, or one library, at a time and must answer in O(1); a policy that thinks in rounds declares `period_s` and is told
what changed since its last round.

| seam | question |
|---|---|
| `Provisioning` | how many pilots, of which kind? |
| `Residency` | which contexts live on which device? |
| `Dispatch` | which queued call goes to which library? |
| execution | on a device, whose turn is it? Answered on the pilot, by `stoker.pilot.core` |

What calls may wish for, of themselves and of their context, and which policies take it into account.

A policy names the wishes that it honours (`Dispatch.honours`, `Residency.honours`). A call with any other wish is
refused where it is made, or where it comes in: nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from stoker.contexts.recipe import NO_LIMITS, Awareness, LibraryLimits
from stoker.errors import StokerError
from stoker.manager.core.events import About, OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Call, Context, Device, Library, Pilot
from stoker.manager.core.state import Block, SourceState
from stoker.protocol.calls import CallForecast, CallOptions, CallProgress, Failure, Features
from stoker.protocol.ids import BlockId, CallId, ClientId, DeviceId, LibraryId, PilotId, RecipeKey


class PolicyError(StokerError):
    """A policy asked for something that cannot be: a bug in the policy. Nothing was changed."""


class View(Protocol):
    """What policies see. Read only: the types are the core's own, and touching them is a bug that tests catch."""

    @property
    def now(self) -> float:
        """Seconds, on the manager's clock."""

    @property
    def ends_per_s(self) -> int:
        """Calls that ended in the last whole second, of all contexts."""

    @property
    def contexts(self) -> Mapping[str, Context]:
        """By recipe key."""

    @property
    def calls(self) -> Mapping[int, Call]:
        """Calls that have not ended."""

    @property
    def pilots(self) -> Mapping[PilotId, Pilot]:
        """Pilots that are not gone."""

    @property
    def libraries(self) -> Mapping[LibraryId, Library]:
        """Libraries that are not gone."""

    @property
    def hungry(self) -> Mapping[str, Context]:
        """Contexts with waiting calls, by recipe key."""

    @property
    def reports(self) -> Mapping[int, CallProgress]:
        """What running calls, and those that were evicted, said last of their progress."""

    @property
    def forecasts(self) -> Mapping[int, CallForecast]:
        """What was said last of the ends of calls."""

    @property
    def sources(self) -> Mapping[str, SourceState]:
        """Where pilots can be had from, by name."""

    @property
    def blocks(self) -> Mapping[BlockId, Block]:
        """Blocks that were asked for and are not over."""

    @property
    def most_pilots(self) -> Mapping[ClientId, int]:
        """How many pilots each client that starts blocks by itself brings at most; 0 = any number."""

    def devices(self) -> Iterator[Device]:
        """Devices of pilots that can be given work."""


# ---- actions
class Send(msgspec.Struct, frozen=True):
    """Send a waiting call to a ready library. An `offer` may be refused by the pilot. `reserve_bytes`: the library's
    reservation is changed to that for an offer, and stays as it is if that is refused (0: it is not changed)."""

    call: CallId
    library: LibraryId
    offer: bool = False
    reserve_bytes: int = 0


class SendGang(msgspec.Struct, frozen=True):
    """Start a waiting call on all of these libraries together; rank = position."""

    call: CallId
    libraries: tuple[LibraryId, ...]


class Drop(msgspec.Struct, frozen=True):
    """End a waiting call without running it, for a reason that reaches the user."""

    call: CallId
    reason: str


class Evict(msgspec.Struct, frozen=True):
    """Checkpoint a running call and take it back; it waits again with its progress kept."""

    call: CallId


class TakeBack(msgspec.Struct, frozen=True):
    """Take back up to `count` calls that a library has not begun."""

    library: LibraryId
    count: int


class Load(msgspec.Struct, frozen=True):
    """Load a context on devices of one pilot, promising it this much memory on each."""

    recipe: RecipeKey
    pilot: PilotId
    devices: tuple[DeviceId, ...]
    memory_bytes: int


class Unload(msgspec.Struct, frozen=True):
    """End a library, after what it runs."""

    library: LibraryId
    reason: str


class Resize(msgspec.Struct, frozen=True):
    """Change a library's reservation on each of its devices. A shrink is free only when the pilot says it is done."""

    library: LibraryId
    memory_bytes: int


class FailCall(msgspec.Struct, frozen=True):
    """End a waiting call with this failure."""

    call: CallId
    failure: Failure


class FailWaiting(msgspec.Struct, frozen=True):
    """End every waiting call of a context with this failure."""

    recipe: RecipeKey
    failure: Failure


class Forecast(msgspec.Struct, frozen=True):
    """What a call's end is expected to be: when, and whether that is before its deadline. Its client is told."""

    call: CallId
    ends_at: float
    in_time: bool


class Timer(msgspec.Struct, frozen=True):
    """Ask again at this time. The asking policy gets `timer(view, key)`."""

    at: float
    key: str


class WantBlocks(msgspec.Struct, frozen=True):
    """Ask for so many more blocks of a source."""

    source: str
    count: int


class ReleaseBlock(msgspec.Struct, frozen=True):
    """Let a block go: its pilots finish what they run, then its job is cancelled."""

    block: BlockId
    reason: str


class Quarantine(msgspec.Struct, frozen=True):
    """Keep a device of a pilot free for `for_s`, or all of its devices (None): what runs there runs to its end."""

    pilot: PilotId
    device: DeviceId | None
    reason: str
    for_s: float = 600.0


class Ask(msgspec.Struct, frozen=True):
    """Ask for advice on a subject (a recipe's key alone: on its context); it arrives later, or never."""

    about: About | RecipeKey


Action = (
    Send | SendGang | Drop | Evict | TakeBack | Load | Unload | Resize | FailCall | FailWaiting | Forecast | Timer
    | WantBlocks | ReleaseBlock | Quarantine | Ask
)  # fmt: skip


class Changes(msgspec.Struct):
    """What changed since a policy's last round, by id (an id may no longer exist)."""

    calls: set[int] = msgspec.field(default_factory=set)
    libraries: set[int] = msgspec.field(default_factory=set)
    pilots: set[str] = msgspec.field(default_factory=set)
    contexts: set[str] = msgspec.field(default_factory=set)
    latency_shares: list[float] = msgspec.field(
        default_factory=list
    )  # Times of ended calls as shares of their wanted latency


# ---- seams
class Rounds(Protocol):
    """What every policy may have besides its own questions."""

    @property
    def period_s(self) -> float:
        """Seconds between rounds; 0 = it does not think in rounds."""

    def round(self, view: View, changes: Changes) -> Iterable[Action]:
        """A whole plan, given what changed since the last round."""

    def rests(self, view: View) -> bool:
        """Asked after each round: whether no other is needed until something changes. An idle session then does
        nothing at all, and writes nothing into its journal."""

    def timer(self, view: View, key: str) -> Iterable[Action]:
        """A timer that this policy asked for has fired."""

    def advised(self, view: View, context: Context) -> Iterable[Action]:
        """Advice on a context has arrived."""

    def failure_judged(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:
        """It is known why something has failed on a pilot that is here or cut off: `pilot.verdicts` has this verdict
        and those before it."""

    def pace_told(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:
        """It is known how a running call gets on."""


class Dispatch(Rounds, Protocol):
    """Which queued call goes to which library?"""

    @property
    def by_deadline(self) -> bool:
        """Whether calls with a deadline stand first in the queues of their contexts, and are dropped or told of by the
        core when they can no longer be in time. False for a policy that plans with deadlines by itself."""

    @property
    def by_run_time(self) -> bool:
        """Whether calls that are expected to run shortly stand first within a priority."""

    @property
    def honours(self) -> frozenset[str]:
        """The wishes of calls that it takes into account (`stoker.manager.core.seams.WISHES`); calls with another one
        are refused."""

    @property
    def asks_every_call(self) -> bool:
        """Whether `place` wants to see calls that arrive while no library of their context has room."""

    @property
    def places_one_by_one_up_to(self) -> int:
        """`place` is asked about each of so many calls that arrive together while nothing of their context waits. More
        of them enter the queue, which is offered to libraries in `serve_order`: that costs less a call."""

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        """Where a call that has just arrived, or was refused, goes: a ready library with room, an action or several, or
        None to let it wait. O(1)."""

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        """What a library with room takes: so many calls from the head of its context's queue (those for one library,
        `queue.single()`, of the head's group alone; it is asked again), or actions. O(1)."""

    def pull_others(self, view: View, library: Library) -> Iterable[Action]:
        """A library has room, its own context's queue has given what it could, and calls of contexts that list its
        context as a variant wait (`context.listed_by`): the `Send`s of those that it takes."""

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        """Calls came to a context's queue, or came back: the libraries that are offered it, in this order. Each with
        room is asked (`pull`) before the next one is taken from the answer, until nothing waits. A generator sees what
        the libraries before have taken, and may end early; it is to cost O(1) for each library that takes calls."""

    def dry(self, view: View, library: Library) -> Iterable[Action]:
        """A library has nothing to do and its queue is empty."""

    def window(self, view: View, library: Library) -> int:
        """How many calls a library may hold just now, those it runs included."""


class Residency(Rounds, Protocol):
    """Which contexts live on which device?"""

    @property
    def honours(self) -> frozenset[str]:
        """The wishes of contexts that it takes into account: `max_libraries`, `min_libraries`, `keep_alive`
        (`Context.limits`). Calls whose program wishes for another one are refused."""

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """A context has waiting calls, and its demand or the devices have changed."""

    def measured(self, view: View, library: Library) -> int:
        """What to promise a library that has just loaded, in bytes on each device: what it declares, or not less than
        was measured (of which the pilot holds the exact sum); more than before is not given."""

    def idle(self, view: View, library: Library) -> Iterable[Action]:
        """A library of a context with limits has nothing to do. Asked of policies that honour limits alone."""


class Provisioning(Rounds, Protocol):
    """How many pilots, of which kind?"""

    def demand(self, view: View) -> Sequence[Action]:
        """Blocks or pilots came or went, or a context has begun to want devices."""

    def may_bring(self, view: View, context: Context) -> bool:
        """Whether pilots that are not here yet could hold this context."""


class Policies(msgspec.Struct, frozen=True):
    """One answer to each question.

    `awareness`: the most that a context keeps between calls under these policies; None = what its recipe says. It is a
    property of recipes, so a simulated run applies it to the contexts of its scenario, and a program says it where it
    makes its contexts, `@context(awareness=...)`.
    """

    dispatch: Dispatch
    residency: Residency
    provisioning: Provisioning
    awareness: Awareness | None = None

    @property
    def honours(self) -> frozenset[str]:
        """The wishes that they take into account together."""
        return self.dispatch.honours | self.residency.honours


__all__ = [
    "Action", "Ask", "Changes", "ClientId", "Dispatch", "Drop", "Evict", "FailCall", "FailWaiting", "Forecast", "Load",
    "Policies", "PolicyError", "Provisioning", "Quarantine", "ReleaseBlock", "Residency", "Resize", "Rounds", "Send",
    "SendGang", "TakeBack", "Timer", "Unload", "View", "WantBlocks",
]  # fmt: skip


# ---- wishes of calls
WISHES = {
    "priority": "a priority",
    "deadline": "a deadline",
    "latency_s": "a latency",
    "ttft_s": "a time to first token",
    "tpot_s": "a time per output token",
    "variants": "other contexts that can serve a call (variants)",
    "expected_output": "features with an expected output",
    "min_libraries": "a least number of libraries of its context",
    "max_libraries": "a largest number of libraries of its context",
    "keep_alive": "a time after which an idle library of its context is unloaded",
}
"""Every wish, and what it is."""


def wished(
    options: CallOptions,
    *,
    deadline: bool = False,
    features: Features | None = None,
    limits: LibraryLimits = NO_LIMITS,
) -> Iterator[str]:
    """The wishes that calls with these options have. `deadline`: they will have one when they are sent. `limits`: what
    their program wishes of their context."""
    objective = options.objective
    has = {
        "priority": options.priority != 0,
        "deadline": deadline or objective.deadline_at > 0,
        "latency_s": objective.latency_s > 0,
        "ttft_s": objective.ttft_s > 0 or objective.ttft_per_token_s > 0,
        "tpot_s": objective.tpot_s > 0,
        "variants": bool(options.variants),
        "expected_output": features is not None and features.expected_output > 0,
        "min_libraries": limits.least > 0,
        "max_libraries": limits.most > 0,
        "keep_alive": limits.keep_alive_s is not None,
    }
    yield from (wish for wish, is_there in has.items() if is_there)


def refusal(
    options: CallOptions,
    honoured: frozenset[str],
    *,
    policy: str = "of the session",
    deadline: bool = False,
    features: Features | None = None,
    limits: LibraryLimits = NO_LIMITS,
) -> str:
    """Why calls with these options are refused; empty if the policy honours all that they wish for."""
    ignored = [
        wish for wish in wished(options, deadline=deadline, features=features, limits=limits) if wish not in honoured
    ]
    if not ignored:
        return ""
    what = ", ".join(WISHES[wish] for wish in ignored)
    able = ", ".join(WISHES[wish] for wish in WISHES if wish in honoured) or "no wish of a call"
    return (
        f"the policy {policy} does not honour {what} (it honours {able}); leave {', '.join(ignored)} away, or name a "
        "policy that does ([policy] name)"
    )
