"""The seams: questions to each policy, its actions, and the *wishes* (options of calls) that it honours.

A policy reads a view and returns actions; it changes nothing itself. A generator sees the effect of each action that it
yields. A policy that plans in rounds declares `period_s`.

| seam | question |
|---|---|
| `Provisioning` | how many pilots, of which kind? |
| `Residency` | which contexts are on which device? |
| `Dispatch` | which queued call goes to which library? |
| execution | which library runs on a device now? `stoker.pilot.core` answers |

A call with a wish that no policy honours (`honours`) is refused in its program.
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
    """A policy returned an impossible action: a bug in the policy. It changed nothing."""


class View(Protocol):
    """The manager's state, read-only."""

    @property
    def now(self) -> float:
        """Seconds on the manager's clock."""

    @property
    def ends_per_s(self) -> int:
        """Calls that ended in the last whole second."""

    @property
    def contexts(self) -> Mapping[str, Context]:
        """Contexts by recipe key."""

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
    def waiting_contexts(self) -> Mapping[str, Context]:
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
        """Limit on pilots in blocks that each client starts itself; 0 = no limit."""

    def devices(self) -> Iterator[Device]:
        """Devices that can get work."""


# ---- actions
class Send(msgspec.Struct, frozen=True):
    """Send a waiting call to a ready library.

    `offer`: the pilot may refuse it. `reserve_bytes`: the library's reservation for an offer; 0 = unchanged.
    `preempts`: libraries on the same devices that end, and whose calls are evicted, if the pilot accepts the offer.
    """

    call: CallId
    library: LibraryId
    offer: bool = False
    reserve_bytes: int = 0
    preempts: tuple[LibraryId, ...] = ()


class SendGang(msgspec.Struct, frozen=True):
    """Start a waiting call on these libraries together; a library's position is its rank."""

    call: CallId
    libraries: tuple[LibraryId, ...]


class Drop(msgspec.Struct, frozen=True):
    """End a waiting call without running it; the user gets the reason.

    `retry_after_s`: when a new try may succeed; 0 = unknown.
    """

    call: CallId
    reason: str
    retry_after_s: float = 0.0


class Evict(msgspec.Struct, frozen=True):
    """Checkpoint a running call and requeue it with its progress."""

    call: CallId


class TakeBack(msgspec.Struct, frozen=True):
    """Take back up to `count` calls that a library has not begun."""

    library: LibraryId
    count: int


class Load(msgspec.Struct, frozen=True):
    """Load a context on devices of one pilot; reserve `memory_bytes` on each."""

    recipe: RecipeKey
    pilot: PilotId
    devices: tuple[DeviceId, ...]
    memory_bytes: int


class Unload(msgspec.Struct, frozen=True):
    """End a library after its running calls."""

    library: LibraryId
    reason: str


class Sleep(msgspec.Struct, frozen=True):
    """Put an idle library to sleep: its context's weights move to host memory, and it frees its device."""

    library: LibraryId


class Wake(msgspec.Struct, frozen=True):
    """Wake a library that sleeps, with the reservation that it had."""

    library: LibraryId


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
    """Tell a client when a call ends, and whether it meets its deadline."""

    call: CallId
    ends_at: float
    in_time: bool


class Timer(msgspec.Struct, frozen=True):
    """Call `timer(view, key)` at this time."""

    at: float
    key: str


class WantBlocks(msgspec.Struct, frozen=True):
    """Request more blocks of a source."""

    source: str
    count: int


class ReleaseBlock(msgspec.Struct, frozen=True):
    """Cancel a block's job after its pilots' running calls."""

    block: BlockId
    reason: str


class Quarantine(msgspec.Struct, frozen=True):
    """Keep a pilot's device, or all devices (None), unused for `for_s` seconds."""

    pilot: PilotId
    device: DeviceId | None
    reason: str
    for_s: float = 600.0


class Ask(msgspec.Struct, frozen=True):
    """Ask for advice, which arrives later or never."""

    about: About | RecipeKey


Action = (
    Send | SendGang | Drop | Evict | TakeBack | Load | Unload | Sleep | Wake | Resize | FailCall | FailWaiting
    | Forecast | Timer | WantBlocks | ReleaseBlock | Quarantine | Ask
)  # fmt: skip


class Changes(msgspec.Struct):
    """Ids of records that changed since a policy's last round."""

    calls: set[int] = set()
    libraries: set[int] = set()
    pilots: set[str] = set()
    contexts: set[str] = set()
    latency_shares: list[float] = []  # Duration of each ended call / its latency objective


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
        """The advisor's verdict on a failure arrived; `pilot.verdicts` includes it."""

    def pace_told(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:
        """New progress of a running call arrived."""


class Dispatch(Rounds, Protocol):
    """Chooses a library for each queued call."""

    @property
    def by_deadline(self) -> bool:
        """True if calls with a deadline go first and the core drops or demotes lost calls."""

    @property
    def by_run_time(self) -> bool:
        """True if calls with a short expected run time go first within a priority."""

    @property
    def honours(self) -> frozenset[str]:
        """Those of `stoker.manager.core.seams.WISHES` that it honours; calls with other wishes are refused."""

    @property
    def asks_every_call(self) -> bool:
        """True if `place` also gets calls that arrive while no library has capacity."""

    @property
    def places_one_by_one_up_to(self) -> int:
        """Most calls that arrive together at an empty queue and go to `place`; more calls are queued."""

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        """Return a ready library with room for the call, actions, or None to let it wait. O(1)."""

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        """Return how many calls of its queue's first group a library with room takes, or actions. O(1)."""

    def pull_others(self, view: View, library: Library) -> Iterable[Action]:
        """Return `Send`s for calls of contexts that list this library's context (`context.listed_by`)."""

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        """Yield the libraries that may take a context's waiting calls, in order; O(1) for each.

        Each library takes calls before the next is yielded.
        """

    def dry(self, view: View, library: Library) -> Iterable[Action]:
        """A library is idle and its queue is empty."""

    def window(self, view: View, library: Library) -> int:
        """Return the number of calls that a library may hold now, running calls included."""


class Residency(Rounds, Protocol):
    """Chooses the contexts of each device."""

    @property
    def honours(self) -> frozenset[str]:
        """Wishes of contexts that it honours: `max_libraries`, `min_libraries`, `keep_alive`."""

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """A context has waiting calls, and its demand or the devices changed."""

    def measured(self, view: View, library: Library) -> int:
        """Return the bytes to reserve for a loaded library on each device; at most its present reservation."""

    def idle(self, view: View, library: Library) -> Iterable[Action]:
        """A library of a context with limits is idle."""


class Provisioning(Rounds, Protocol):
    """Chooses how many pilots to request, of which kind."""

    def demand(self, view: View) -> Sequence[Action]:
        """Blocks or pilots joined or left, or a context began to need devices."""

    def may_bring(self, view: View, context: Context) -> bool:
        """True if future pilots could hold this context."""


class Policies(msgspec.Struct, frozen=True):
    """One policy for each seam. `awareness`: limit on what contexts keep between calls; None = as the recipe says.
    `compares_kinds`: measure the speeds of device kinds.
    """

    dispatch: Dispatch
    residency: Residency
    provisioning: Provisioning
    awareness: Awareness | None = None
    compares_kinds: bool = True

    @property
    def honours(self) -> frozenset[str]:
        """Wishes that the policies honour together."""
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
    "min_libraries": "a minimum of libraries of its context",
    "max_libraries": "a maximum of libraries of its context",
    "keep_alive": "a time after which an idle library of its context is unloaded",
}
"""Every wish and its description."""


def wished(
    options: CallOptions, *, deadline: bool = False, features: Features | None = None, limits: LibraryLimits = NO_LIMITS
) -> Iterator[str]:
    """Yield the wishes that these options express. `deadline`: True if the calls get a deadline later."""
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
    """Return why calls with these options are refused; empty if accepted."""
    ignored = [
        wish for wish in wished(options, deadline=deadline, features=features, limits=limits) if wish not in honoured
    ]
    if not ignored:
        return ""
    what = ", ".join(WISHES[wish] for wish in ignored)
    able = ", ".join(WISHES[wish] for wish in WISHES if wish in honoured) or "none of these options"
    return (
        f"the policy {policy} does not honour {what} (it honours {able}); leave out {', '.join(ignored)}, or name a "
        "policy that does ([policy] name)"
    )
