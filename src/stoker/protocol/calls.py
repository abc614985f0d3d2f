"""Parts of messages about calls: a call, its options, its end; and lists of calls.

A process may hold a million of these structs. They are frozen and have no cycles, so the garbage collector need not
walk them.
"""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.folders import ProgramFolder
from stoker.contexts.recipe import ObjectRef
from stoker.protocol.ids import CallId, RecipeKey

Payload = bytes | ObjectRef
"""Pickled bytes that only a library or the client may unpickle; larger ones travel as an object."""

INLINE_LIMIT_BYTES = 1_000_000

PIECE_BYTES = 1_000_000
"""The largest pickled piece of a result."""
WINDOW_PIECES, WINDOW_BYTES = 256, 1_000_000
"""A call pauses its yields while this many of its pieces, or bytes, are unacknowledged. One piece is always allowed."""


class Features(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts about a call's input for policies. Lengths in tokens; 0 = unknown.

    `fixed_s`: seconds before the first item, on any number of devices. `shared_s`: seconds of one device before the
    first item, divided among a gang. Calls of one `kind` end after a similar part of their items.
    """

    items: int = 1
    input_length: int = 0
    expected_output: int = 0
    fixed_s: float = 0.0
    kind: str = ""
    shared_s: float = 0.0

    def before_items_s(self, size: int) -> float:
        """Return the seconds before the first item on a gang.

        Args:
            size: Number of devices.
        """
        return self.fixed_s + self.shared_s / size


class Objective(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The wanted timing of a call. Seconds; 0 = none.

    `deadline_at` is on the clock of the manager, which sets it when it accepts the call (`Submit.due_in_s`). With
    `drop_late` a call that will miss it is dropped; otherwise it runs when no other call needs its devices. The time to
    first token may grow with the input: `ttft_s`, or `ttft_per_token_s` per input token if that is more, and at most
    `ttft_most_s`.
    """

    deadline_at: float = 0.0
    latency_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    drop_late: bool = False
    ttft_per_token_s: float = 0.0
    ttft_most_s: float = 0.0

    def first_token_s(self, input_length: int) -> float:
        """Return the wanted time to first token for an input of this many tokens; 0 = none."""
        wanted_s = max(self.ttft_s, self.ttft_per_token_s * input_length)
        return min(wanted_s, self.ttft_most_s) if self.ttft_most_s else wanted_s


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    """The options that the calls of one submission share.

    `variants`: other contexts that can serve the call, best first. `gang`: the smallest and largest number of libraries
    that run it together. `limit_s`: the most seconds of a run, without waits for its reader (0 = no limit). `stream`:
    pieces that the function yields are sent as they come; otherwise the result is their list. `folder`: where the user
    wants it to run; empty: in the program's folder `home` if the pilot sees it, else in a private one. `batch`: the
    most items that `stoker.map` puts into a call (0 = not packed).
    """

    priority: int = 0
    objective: Objective = Objective()
    stream: bool = False
    variants: tuple[RecipeKey, ...] = ()
    gang: tuple[int, int] = (1, 1)
    limit_s: float = 0.0
    folder: str = ""
    batch: int = 0
    home: ProgramFolder | None = None


class CallSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`payload`: the pickled `(args, kwargs)`."""

    call: CallId
    payload: Payload
    features: Features | None = None
    progress: bytes = b""


class FailureKind(enum.Enum):
    CONTEXT = "context"
    """Its context failed to load."""
    PILOT = "pilot"
    """Its pilot failed (its disk is full or read-only)."""
    NO_DEVICE = "no_device"
    """No device of this site could ever hold its context."""
    POISON = "poison"
    """It killed its library several times."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    """Its library took more memory than the recipe declares."""
    SERIALIZATION = "serialization"
    """Its function, arguments, result or exception could not be pickled or unpickled."""
    DROPPED = "dropped"
    CANCELLED = "cancelled"
    """It was cancelled, or the session ended before it ran."""
    DIED = "died"
    """Its library process ended, by a signal or a call of exit."""
    GANG = "gang"
    """Ranks of its gang were lost or did not join. It fails only after many tries."""
    INFRASTRUCTURE = "infrastructure"
    """A device, disk or network failed it. It fails only after several pilots."""


class Printed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call's output: bytes `start` to `end` (0: to the end) of the log file `path` on its pilot."""

    path: str
    start: int
    end: int


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Evidence of a failure. `signal`: 0 unless a signal ended the process. `log`: the library's log; `printed`: the
    part of the failed call; `tail`: its last lines (for a failed load: of the log). `device`: the devices that
    failed."""

    kind: FailureKind
    message: str
    pilot: str = ""
    library: int = 0
    signal: int = 0
    exit_code: int = 0
    tail: str = ""
    log: str = ""
    device: str = ""
    printed: Printed | None = None


class LeftFiles(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Files that a call left in its private folder, which is deleted. `home`: the program's folder, which its pilot
    does not see."""

    function: str
    names: tuple[str, ...]
    count: int
    home: str = ""


class CallEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a call. The client receives exactly one for each accepted call.

    `ok`: payload is the pickled result. Not `ok` without `failure`: payload is the pickled exception of the user's
    function with its traceback. Otherwise `failure` says what happened; for a failure of infrastructure, payload may be
    the pickled exception. `run_s`: seconds in the function. `pieces`: of its run, all acknowledged. `raised`: the
    exception in short, with a line for each place in the user's code.
    """

    call: CallId
    ok: bool
    payload: Payload = b""
    run_s: float = 0.0
    failure: Failure | None = None
    printed: Printed | None = None
    pieces: int = 0
    raised: str = ""
    left: LeftFiles | None = None


class CallProgress(msgspec.Struct, frozen=True, array_like=True):
    """A running call's report: steps `done` of `total` (0 = unknown), and a metric. `state`: a checkpoint from which it
    can resume elsewhere."""

    call: CallId
    done: float = 0.0
    total: float = 0.0
    metric: float = 0.0
    state: bytes = b""


class CallForecast(msgspec.Struct, frozen=True, array_like=True):
    """The expected end of a call on the manager's clock (`Forecasts.said_at`)."""

    call: CallId
    ends_at: float
    in_time: bool


class GangPlace(msgspec.Struct, frozen=True):
    """A member's place in its gang. `rendezvous`: the meeting address (`host:port`; empty: rank 0 will report it)."""

    rank: int
    size: int
    rendezvous: str = ""


# ---- lists of calls, for `stoker calls`


class ListedState(enum.Enum):
    """The state of a listed call."""

    RUNNING = "running"
    """A library has it: it runs, or will after earlier calls there."""
    WAITING = "waiting"
    FAILED = "failed"
    """Ended without a result, except by cancellation."""


class ListedCall(msgspec.Struct, frozen=True):
    """A call in `stoker calls`. `where`: `pilot/library` of a running call (of each member of a gang), with `ahead`
    calls before it there. `error`: the first line of a failed call's error, if known. `due_in_s`: until its deadline
    (negative: missed; None: no deadline); `ends_in_s`: until its expected end (None: unknown)."""

    call: str
    function: str
    context: str
    state: ListedState
    since_s: float
    where: tuple[str, ...] = ()
    ahead: int = 0
    error: str = ""
    done: float = 0.0
    total: float = 0.0
    metric: float = 0.0
    due_in_s: float | None = None
    ends_in_s: float | None = None


class FailureGroup(msgspec.Struct, frozen=True):
    """Calls of one function with the same failure. `error`: the exception's class, or how the call was ended; `place`:
    the innermost line of the user's code (`FILE:LINE in NAME`; empty: unknown). `example`: the last of these calls;
    `message`: its error. `first_s`, `last_s`: seconds since then."""

    function: str
    error: str
    place: str
    count: int
    example: str
    message: str
    first_s: float
    last_s: float
