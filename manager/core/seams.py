"""The interfaces of the policies (*seams*), and the actions that policies return.

A policy reads a `View` of the manager's state and returns actions; it changes nothing directly. A policy that yields
its actions sees the effect of each action before the next. A policy that plans in rounds sets `period_s`.

| seam | question |
|---|---|
| `Provisioning` | how many pilots of which kind? |
| `Residency` | which contexts are on which device? |
| `Dispatch` | which queued call runs in which library? |
| execution | which library runs on a device now? `stoker.pilot.core` decides |

Each policy lists the options of calls that it supports in `honours`. The client refuses a call with another option of
`WISHES`.
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
    """A policy returned an invalid action, which is a bug in the policy. The action was not carried out."""


class View(Protocol):
    """A read-only view of the manager's state. `State` explains each field."""

    @property
    def now(self) -> float: ...
    @property
    def ends_per_s(self) -> int: ...
    @property
    def contexts(self) -> Mapping[str, Context]: ...
    @property
    def calls(self) -> Mapping[int, Call]: ...
    @property
    def pilots(self) -> Mapping[PilotId, Pilot]: ...
    @property
    def libraries(self) -> Mapping[LibraryId, Library]: ...
    @property
    def waiting_contexts(self) -> Mapping[str, Context]: ...
    @property
    def reports(self) -> Mapping[int, CallProgress]: ...
    @property
    def forecasts(self) -> Mapping[int, CallForecast]: ...
    @property
    def sources(self) -> Mapping[str, SourceState]: ...
    @property
    def blocks(self) -> Mapping[BlockId, Block]: ...
    @property
    def most_pilots(self) -> Mapping[ClientId, int]: ...
    def devices(self) -> Iterator[Device]:
        """Yield the fault-free devices of connected pilots, except pilots that are reserved for a call."""


# ---- actions
class Send(msgspec.Struct, frozen=True):
    """Send a waiting call to a ready library.

    `offer`: True if the pilot may refuse the call. `reserve_bytes`: new memory reservation of the library; 0 =
    unchanged. `preempts`: libraries on the same devices that stop if the pilot accepts the call.
    """

    call: CallId
    library: LibraryId
    offer: bool = False
    reserve_bytes: int = 0
    preempts: tuple[LibraryId, ...] = ()


class SendGang(msgspec.Struct, frozen=True):
    """Start a waiting call on several libraries together. A library's rank is its position in `libraries`."""

    call: CallId
    libraries: tuple[LibraryId, ...]


class Drop(msgspec.Struct, frozen=True):
    """End a waiting call without running it. `retry_after_s`: seconds until a retry may succeed; 0 = unknown."""

    call: CallId
    reason: str
    retry_after_s: float = 0.0


class Evict(msgspec.Struct, frozen=True):
    """Checkpoint a running call and requeue it with its progress."""

    call: CallId


class TakeBack(msgspec.Struct, frozen=True):
    """Requeue up to `count` calls that were sent to a library and have not started."""

    library: LibraryId
    count: int


class Load(msgspec.Struct, frozen=True):
    """Load a context on devices of one pilot; reserve `memory_bytes` on each device."""

    recipe: RecipeKey
    pilot: PilotId
    devices: tuple[DeviceId, ...]
    memory_bytes: int


class Unload(msgspec.Struct, frozen=True):
    """Stop a library after its running calls have ended."""

    library: LibraryId
    reason: str


class Sleep(msgspec.Struct, frozen=True):
    """Put an idle library to sleep: its weights move to host memory."""

    library: LibraryId


class Wake(msgspec.Struct, frozen=True):
    """Wake a sleeping library. It reserves as much device memory as before its sleep."""

    library: LibraryId


class Resize(msgspec.Struct, frozen=True):
    library: LibraryId
    memory_bytes: int


class FailCall(msgspec.Struct, frozen=True):
    call: CallId
    failure: Failure


class FailWaiting(msgspec.Struct, frozen=True):
    recipe: RecipeKey
    failure: Failure


class Forecast(msgspec.Struct, frozen=True):
    call: CallId
    ends_at: float
    in_time: bool


class Timer(msgspec.Struct, frozen=True):
    """Call the policy's method `on_timer(view, key)` at time `at`."""

    at: float
    key: str


class WantBlocks(msgspec.Struct, frozen=True):
    """Request `count` more blocks from a batch system."""

    source: str
    count: int


class ReleaseBlock(msgspec.Struct, frozen=True):
    """Cancel the batch job of a block after the block's running calls have ended."""

    block: BlockId
    reason: str


class Quarantine(msgspec.Struct, frozen=True):
    """Load no context on a device for `for_s` seconds. `device`: None = all devices of the pilot."""

    pilot: PilotId
    device: DeviceId | None
    reason: str
    for_s: float = 600.0


class Ask(msgspec.Struct, frozen=True):
    """Request advice from the advisor process. The advice arrives later or never."""

    about: About | RecipeKey


Action = (
    Send | SendGang | Drop | Evict | TakeBack | Load | Unload | Sleep | Wake | Resize | FailCall | FailWaiting
    | Forecast | Timer | WantBlocks | ReleaseBlock | Quarantine | Ask
)  # fmt: skip


class Changes(msgspec.Struct):
    """Ids of the calls, libraries, pilots and contexts that changed since a policy's last planning round."""

    calls: set[int] = set()
    libraries: set[int] = set()
    pilots: set[str] = set()
    contexts: set[str] = set()
    latency_shares: list[float] = []  # Duration of each ended call, divided by its latency objective


# ---- seams
class Rounds(Protocol):
    """Methods that every policy has."""

    @property
    def period_s(self) -> float:
        """Seconds between planning rounds; 0 = the policy has no rounds."""

    def on_round(self, view: View, changes: Changes) -> Iterable[Action]:
        """Return the actions of a new plan for all calls. `changes`: what has changed since the last planning round."""

    def may_skip_rounds(self, view: View) -> bool:
        """Return True if no planning round is needed until the manager's state changes."""

    def on_timer(self, view: View, key: str) -> Iterable[Action]:
        """Return actions after a timer of this policy has expired."""

    def on_advice(self, view: View, context: Context) -> Iterable[Action]:
        """Return actions after advice on a context has arrived."""

    def on_failure_verdict(self, view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:
        """Return actions after the advisor has judged a failure. `pilot.verdicts` contains the verdict."""

    def on_pace_advice(self, view: View, about: OfPace, pace: PaceAdvice) -> Iterable[Action]:
        """Return actions after the advisor has read a running call's progress from its output."""


class Dispatch(Rounds, Protocol):
    """The policy that chooses libraries for queued calls."""

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        """Return a ready library that can take the call, or actions, or None to let the call wait. Runs in O(1)."""

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        """Return how many calls of its queue's first group a library gets now, or actions. Runs in O(1)."""

    def on_out_of_calls(self, view: View, library: Library) -> Iterable[Action]:
        """Return actions for an idle library with an empty queue."""

    def window(self, view: View, library: Library) -> int:
        """Return how many calls a library may hold now, running calls included."""

    @property
    def asks_every_call(self) -> bool:
        """True if the core calls `place` even for calls that arrive while no library has capacity."""

    @property
    def by_deadline(self) -> bool:
        """True if calls with a deadline run first, and a call that can no longer meet it is dropped or runs last."""

    @property
    def by_run_time(self) -> bool:
        """True if calls of equal priority are sorted by expected run time, shortest first."""

    @property
    def honours(self) -> frozenset[str]:
        """Options in `WISHES` that the policy honours. The manager refuses calls with other options of `WISHES`."""

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        """Yield the libraries that may get waiting calls, best first, in O(1). The core fills each before the next."""

    @property
    def places_one_by_one_up_to(self) -> int:
        """Maximum number of calls that `place` handles one by one if they arrive together at an empty queue."""

    def pull_others(self, view: View, library: Library) -> Iterable[Action]:
        """Return `Send`s for calls of contexts that list this library's context as a variant (`context.variant_of`)."""


class Residency(Rounds, Protocol):
    """The policy that chooses the contexts of each device."""

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        """Return actions for a context with waiting calls, after its demand or the devices changed."""

    def reservation_after_load(self, view: View, library: Library) -> int:
        """Return the bytes to reserve on each device for a loaded library, at most its present reservation."""

    def on_idle_library(self, view: View, library: Library) -> Iterable[Action]:
        """Return actions for an idle library whose context has limits (`LibraryLimits`)."""

    @property
    def honours(self) -> frozenset[str]:
        """Context options that this policy honours: any of `max_libraries`, `min_libraries` and `keep_alive`."""


class Provisioning(Rounds, Protocol):
    """The policy that chooses how many pilots of which kind to request."""

    def demand(self, view: View) -> Sequence[Action]:
        """Return actions after blocks or pilots joined or left, or a context began to need devices."""

    def may_bring(self, view: View, context: Context) -> bool:
        """True if future pilots could load this context."""


class Policies(msgspec.Struct, frozen=True):
    """The policies of a session. `awareness`: what libraries may keep between calls (None: as in the recipe).
    `compares_kinds`: True if the manager measures the speeds of device kinds.
    """

    dispatch: Dispatch
    residency: Residency
    provisioning: Provisioning
    awareness: Awareness | None = None
    compares_kinds: bool = True

    @property
    def honours(self) -> frozenset[str]:
        return self.dispatch.honours | self.residency.honours


# ---- options that a policy may not support
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


def describe_refused_options(
    options: CallOptions, honoured: frozenset[str], *, policy: str = "of the session", deadline: bool = False,
    features: Features | None = None, limits: LibraryLimits = NO_LIMITS,
) -> str:  # fmt: skip
    """Return why calls with these options are refused; empty if not. `deadline`: True if a deadline is set later."""
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
    ignored = [wish for wish, is_there in has.items() if is_there and wish not in honoured]
    if not ignored:
        return ""
    what = ", ".join(WISHES[wish] for wish in ignored)
    able = ", ".join(WISHES[wish] for wish in WISHES if wish in honoured) or "none of these options"
    return (
        f"the policy {policy} does not honour {what} (it honours {able}); leave out {', '.join(ignored)}, or name a "
        "policy that does ([policy] name)"
    )
