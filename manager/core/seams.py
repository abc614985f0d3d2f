"""The seams: questions to policies and their answers, and wishes of calls that they honour.

A policy is asked over a read-only view and answers with actions; it never sends and never changes anything. A generator
of actions sees the view after each one. The hot path wants O(1) answers; a policy that plans in rounds declares
`period_s`.

| seam | question |
|---|---|
| `Provisioning` | how many pilots, of which kind? |
| `Residency` | which contexts live on which device? |
| `Dispatch` | which queued call goes to which library? |
| execution | whose turn is it on a device? `stoker.pilot.core` answers |

A call with a wish that no policy honours (`honours`) is refused where it is made.
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
    """A policy asked for something impossible: a bug in the policy. Nothing was changed."""


class View(Protocol):
    """The view of policies. Read-only: tests catch policies that change it."""

    @property
    def now(self) -> float:
        """Seconds, on the manager's clock."""

    @property
    def ends_per_s(self) -> int:
        """Calls that ended in the last whole second."""

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
        """Last progress reports of running and evicted calls."""

    @property
    def forecasts(self) -> Mapping[int, CallForecast]:
        """Last forecasts of calls."""

    @property
    def sources(self) -> Mapping[str, SourceState]:
        """Sources of pilots, by name."""

    @property
    def blocks(self) -> Mapping[BlockId, Block]:
        """Blocks that are not over."""

    @property
    def most_pilots(self) -> Mapping[ClientId, int]:
        """Pilots that each client's own blocks bring at most; 0 = no limit."""

    def devices(self) -> Iterator[Device]:
        """Devices that can get work."""


# ---- actions
class Send(msgspec.Struct, frozen=True):
    """Send a waiting call to a ready library.

    `offer`: the pilot may refuse it. `reserve_bytes`: the library's reservation for an offer; 0 = unchanged.
    """

    call: CallId
    library: LibraryId
    offer: bool = False
    reserve_bytes: int = 0


class SendGang(msgspec.Struct, frozen=True):
    """Start a waiting call on these libraries together; rank = position."""

    call: CallId
    libraries: tuple[LibraryId, ...]


class Drop(msgspec.Struct, frozen=True):
    """End a waiting call without running it; the reason reaches the user."""

    call: CallId
    reason: str


class Evict(msgspec.Struct, frozen=True):
    """Checkpoint a running call and requeue it with its progress."""

    call: CallId


class TakeBack(msgspec.Struct, frozen=True):
    """Take back up to `count` calls that a library has not begun."""

    library: LibraryId
    count: int


class Load(msgspec.Struct, frozen=True):
    """Load a context on devices of one pilot, promising this memory on each."""

    recipe: RecipeKey
    pilot: PilotId
    devices: tuple[DeviceId, ...]
    memory_bytes: int


class Unload(msgspec.Struct, frozen=True):
    """End a library after its running calls."""

    library: LibraryId
    reason: str


class Resize(msgspec.Struct, frozen=True):
    """Change a library's reservation on each device."""

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
    """Forecast a call's end, and whether it meets its deadline. Its client is told."""

    call: CallId
    ends_at: float
    in_time: bool


class Timer(msgspec.Struct, frozen=True):
    """Ask again at this time, with `timer(view, key)`."""

    at: float
    key: str


class WantBlocks(msgspec.Struct, frozen=True):
    """Request more blocks of a source."""

    source: str
    count: int


class ReleaseBlock(msgspec.Struct, frozen=True):
    """Release a block: its pilots finish their calls, then its job is cancelled."""

    block: BlockId
    reason: str


class Quarantine(msgspec.Struct, frozen=True):
    """Keep a device, or all (None), of a pilot free for `for_s`."""

    pilot: PilotId
    device: DeviceId | None
    reason: str
    for_s: float = 600.0


class Ask(msgspec.Struct, frozen=True):
    """Ask for advice on a subject; it arrives later, or never."""

    about: About | RecipeKey


Action = (
    Send | SendGang | Drop | Evict | TakeBack | Load | Unload | Resize | FailCall | FailWaiting | Forecast | Timer
    | WantBlocks | ReleaseBlock | Quarantine | Ask
)  # fmt: skip


class Changes(msgspec.Struct):
    """Changes since a policy's last round, by id."""

    calls: set[int] = set()
    libraries: set[int] = set()
    pilots: set[str] = set()
    contexts: set[str] = set()
    latency_shares: list[float] = []  # Of ended calls: time / wanted latency


# ---- seams
class Rounds(Protocol):
    """Questions to every policy."""

    @property
    def period_s(self) -> float:
        """Seconds between rounds; 0 = no rounds."""

    def round(self, view: View, changes: Changes) -> Iterable[Action]:
        """Return a whole plan, given the changes since the last round."""

    def rests(self, view: View) -> bool:
        """True if no round is needed until something changes."""

    def timer(self, view: View, key: str) -> Iterable[Action]:
        """A timer of this policy fired."""

    def advised(self, view: View, context: Context) -> Iterable[Action]:
        """Advice on a context arrived."""

    def failure_judged(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:
        """A verdict on a failure arrived; `pilot.verdicts` has it and those before."""

    def pace_told(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:
        """The progress of a running call is known."""


class Dispatch(Rounds, Protocol):
    """Which queued call goes to which library?"""

    @property
    def by_deadline(self) -> bool:
        """True if calls with a deadline go first and the core drops or demotes lost ones."""

    @property
    def by_run_time(self) -> bool:
        """True if calls with a short expected run time go first within a priority."""

    @property
    def honours(self) -> frozenset[str]:
        """The wishes of calls that it honours (`stoker.manager.core.seams.WISHES`); calls with others are refused."""

    @property
    def asks_every_call(self) -> bool:
        """True if `place` wants to see calls that arrive while no library has room."""

    @property
    def places_one_by_one_up_to(self) -> int:
        """Largest number of calls, arriving together at an empty queue, that `place` is asked about. More are
        queued, which costs less."""

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        """Return a ready library with room, actions, or None to let a call wait. O(1)."""

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        """Return how many calls of the head's group a library with room takes, or actions. O(1)."""

    def pull_others(self, view: View, library: Library) -> Iterable[Action]:
        """Return `Send`s for calls of contexts that list this library's context (`context.listed_by`)."""

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        """Yield the libraries that are offered a context's queue, in order.

        Each with room is asked (`pull`) before the next one. A generator sees what earlier ones took; O(1) for each.
        """

    def dry(self, view: View, library: Library) -> Iterable[Action]:
        """A library has nothing to do and its queue is empty."""

    def window(self, view: View, library: Library) -> int:
        """Number of calls that a library may hold now, running ones included."""


class Residency(Rounds, Protocol):
    """Which contexts live on which device?"""

    @property
    def honours(self) -> frozenset[str]:
        """The wishes of contexts that it honours: `max_libraries`, `min_libraries`, `keep_alive`."""

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """A context has waiting calls, and its demand or the devices changed."""

    def measured(self, view: View, library: Library) -> int:
        """Return the bytes on each device to promise a library that has just loaded; never more than before."""

    def idle(self, view: View, library: Library) -> Iterable[Action]:
        """A library of a context with limits is idle."""


class Provisioning(Rounds, Protocol):
    """How many pilots, of which kind?"""

    def demand(self, view: View) -> Sequence[Action]:
        """Blocks or pilots joined or left, or a context began to want devices."""

    def may_bring(self, view: View, context: Context) -> bool:
        """True if future pilots could hold this context."""


class Policies(msgspec.Struct, frozen=True):
    """One policy for each seam. `awareness`: the most that a context keeps between calls; None = as its recipe says."""

    dispatch: Dispatch
    residency: Residency
    provisioning: Provisioning
    awareness: Awareness | None = None

    @property
    def honours(self) -> frozenset[str]:
        """The wishes that they honour together."""
        return self.dispatch.honours | self.residency.honours


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
    options: CallOptions, *, deadline: bool = False, features: Features | None = None, limits: LibraryLimits = NO_LIMITS
) -> Iterator[str]:
    """Yield the wishes of calls with these options. `deadline`: they get one later."""
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
    """Say why calls with these options are refused; empty if they are not."""
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
