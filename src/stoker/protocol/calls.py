"""Parts of messages about calls: a call, its options, its end, and lists of calls.

These structs are frozen and acyclic, so the garbage collector skips them.
"""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.folders import ProgramFolder
from stoker.contexts.recipe import ObjectRef
from stoker.protocol.ids import CallId, RecipeKey


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


Payload = bytes | ObjectRef
"""Pickled bytes, or an `ObjectRef` to these bytes if there are many. Only a library or the client may unpickle them."""

INLINE_LIMIT_BYTES = 1_000_000

PIECE_BYTES = 1_000_000
WINDOW_PIECES, WINDOW_BYTES = 256, 1_000_000
"""Limits on a call's unacknowledged pieces and bytes. Above a limit, the call pauses. One piece is always allowed."""


class Features(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts about a call's input, for policies. Lengths are in tokens (0: unknown). `fixed_s`: seconds before the first
    item, independent of the number of devices. `shared_s`: additional device seconds, divided among a gang's devices.
    `kind`: label of calls that end after a similar fraction of their items.
    """

    items: int = 1
    input_length: int = 0
    expected_output: int = 0
    fixed_s: float = 0.0
    kind: str = ""
    shared_s: float = 0.0
    most_output: int = 0

    def seconds_before_first_item(self, size: int) -> float:
        """Return the seconds that a gang needs before the first item.

        Args:
            size: Number of the gang's devices.
        """
        return self.fixed_s + self.shared_s / size


class Objective(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Timing objectives in seconds (0: none). `deadline_at`: time on the manager's clock. `drop_late`: drop a call that
    will miss its deadline. The time to first token is the larger of `ttft_s` and `ttft_per_token_s` times the input
    tokens, and at most `ttft_most_s`."""

    deadline_at: float = 0.0
    latency_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    drop_late: bool = False
    ttft_per_token_s: float = 0.0
    ttft_most_s: float = 0.0

    def first_token_s(self, input_length: int) -> float:
        """Return the objective for the time to first token in seconds (0: none)."""
        wanted_s = max(self.ttft_s, self.ttft_per_token_s * input_length)
        return min(wanted_s, self.ttft_most_s) if self.ttft_most_s else wanted_s


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    """Options of all calls of a submission. `variants`: other contexts that can run the calls, best first. `gang`:
    minimum and maximum number of libraries. `limit_s`: maximum run time without waits for the client (0: no limit).
    `stream`: send each piece of the result at once. `folder`: working folder (empty: the program's folder `home`, or a
    private folder if the pilot does not see `home`). `batch`: maximum items per call of `stoker.map` (0: one per
    call)."""

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
    """A call. `payload`: the pickled `(args, kwargs)`."""

    call: CallId
    payload: Payload
    features: Features | None = None
    progress: bytes = b""


class RefusalCase(enum.Enum):
    """Why a pilot refuses an offered call. The first three values are the cases of SLINFER §VI-C."""

    FIRST_TOKEN = "first-token"
    """The call's first token would be late."""
    OTHERS = "other-requests"
    """A token of another request would be late."""
    DECODE_ROUND = "decode-round"
    """One decode step of every engine on the device would together take longer than the TPOT objective."""
    MEMORY = "memory"
    """The call's KV cache does not fit into device memory."""
    ENDS = "library-ends"
    """The library or its pilot will end soon, or the library sleeps."""


class FailureKind(enum.Enum):
    CONTEXT = "context"
    PILOT = "pilot"
    """The pilot of the call failed: its disk is full or read-only."""
    NO_DEVICE = "no_device"
    POISON = "poison"
    """The call killed its library several times."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    """The library used more memory than the recipe declares."""
    SERIALIZATION = "serialization"
    DROPPED = "dropped"
    CANCELLED = "cancelled"
    """The call was cancelled, or the session ended before it ran."""
    DIED = "died"
    """The library's process ended, by a signal or by calling exit."""
    GANG = "gang"
    """Ranks of the gang were lost or did not join, several times."""
    INFRASTRUCTURE = "infrastructure"
    """Devices, disks or networks made the call fail on several pilots."""


class OutputRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of a call's output: bytes `start` to `end` (0: end of file) of the log `path` on the pilot."""

    path: str
    start: int
    end: int


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Evidence of a failure. `signal`: signal that ended the process, or 0. `log`: the library's log. `printed`: output
    of the call. `tail`: last lines of `printed`, or of the log for a failed load. `device`: failed devices.
    `retry_after_s`: seconds until a retry of a dropped call may succeed (0: unknown)."""

    kind: FailureKind
    message: str
    pilot: str = ""
    library: int = 0
    signal: int = 0
    exit_code: int = 0
    tail: str = ""
    log: str = ""
    device: str = ""
    printed: OutputRange | None = None
    retry_after_s: float = 0.0


class LeftoverFiles(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names of files that a call left in its private folder, and that Stoker deleted with this folder. `home`: the
    program's folder, which the pilot does not see.
    """

    function: str
    names: tuple[str, ...]
    count: int
    home: str = ""


class CallEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a call. The client receives exactly one end for each accepted call. `payload`: the pickled result, or
    the pickled exception that the function raised. `pieces`: number of acknowledged pieces. `raised`: summary of the
    exception, with its lines in the user's code."""

    call: CallId
    ok: bool
    payload: Payload = b""
    run_s: float = 0.0
    failure: Failure | None = None
    printed: OutputRange | None = None
    pieces: int = 0
    raised: str = ""
    left: LeftoverFiles | None = None


class CallProgress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a call: `done` of `total` steps (0: unknown), a metric, and a checkpoint (`state`)."""

    call: CallId
    done: float = 0.0
    total: float = 0.0
    metric: float = 0.0
    state: bytes = b""


class CallForecast(msgspec.Struct, frozen=True, array_like=True):
    """When a call is expected to end, on the manager's clock (`Forecasts.said_at`)."""

    call: CallId
    ends_at: float
    in_time: bool


class GangPlace(msgspec.Struct, frozen=True):
    """The rank of a library in its gang. `rendezvous`: address `host:port` of rank 0 (empty: not known yet)."""

    rank: int
    size: int
    rendezvous: str = ""


# ---- lists of calls, for `stoker calls`


class ListedState(enum.Enum):
    """The state of a call in `stoker calls`."""

    RUNNING = "running"
    """A library has received the call. The call runs, or waits until the library has run earlier calls."""
    WAITING = "waiting"
    FAILED = "failed"
    """The call ended without a result and was not cancelled."""


class ListedCall(msgspec.Struct, frozen=True):
    """A call in `stoker calls`. `where`: `pilot/library` of each running call or gang member. `ahead`: calls that the
    library runs first. `due_in_s`: seconds until the deadline (negative: missed; None: no deadline). `ends_in_s`: None
    if unknown."""

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
    """Calls of one function with the same failure. `error`: class of the exception, or how the call ended. `place`:
    innermost line of the user's code. `example`, `message`: the newest of these calls, and its error. `first_s`,
    `last_s`: seconds since the first and the last failure."""

    function: str
    error: str
    place: str
    count: int
    example: str
    message: str
    first_s: float
    last_s: float
