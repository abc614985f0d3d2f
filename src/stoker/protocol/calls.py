"""The parts of messages that speak of calls: what a call is, what it wants, how it ended.

There may be a million of them in a process, frozen and without cycles: the garbage collector need not walk them.
"""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.folders import ProgramFolder
from stoker.contexts.recipe import ObjectRef
from stoker.protocol.ids import CallId, RecipeKey

Payload = bytes | ObjectRef
"""Pickled bytes that only a library or the client may open; over 1 MB they travel as an object."""

INLINE_LIMIT_BYTES = 1_000_000
"""Payloads over this size travel as objects."""

PIECE_BYTES = 1_000_000
"""No piece of a result is larger when it is pickled."""
WINDOW_PIECES, WINDOW_BYTES = 256, 1_000_000
"""A call yields no further piece while so many of its pieces, or bytes of them, are not acknowledged. One piece is
always allowed."""


class Features(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What policies may know of a call's input. Lengths in tokens; 0 = unknown. `items` are those that it has at most;
    `fixed_s`: seconds that it takes before the first of them, on however many devices; `shared_s`: seconds of one
    device before the first of them, which the members of a gang share. Calls of one `kind` are alike in how much of
    their items they do before they end; so a kind of its own is what always does all."""

    items: int = 1
    input_length: int = 0
    expected_output: int = 0
    fixed_s: float = 0.0
    kind: str = ""
    shared_s: float = 0.0

    def before_items_s(self, size: int) -> float:
        """Seconds before the first item on a gang of so many. The simulator and every prediction take it from here."""
        return self.fixed_s + self.shared_s / size


class Objective(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the user wants of a call's time. Seconds; 0 = not wanted. `deadline_at` is on the clock of the manager,
    which sets it when it takes the call (`Submit.due_in_s`). With `drop_late`, a call that cannot make it is dropped,
    else it runs when nobody else needs its devices.

    A time to first token may grow with the input: it is `ttft_s`, or `ttft_per_token_s` for each of its tokens where
    that is more, but `ttft_most_s` at the most (`first_token_s`). So calls of all lengths have one objective."""

    deadline_at: float = 0.0
    latency_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    drop_late: bool = False
    ttft_per_token_s: float = 0.0
    ttft_most_s: float = 0.0

    def first_token_s(self, input_length: int) -> float:
        """The time to first token that is wanted of an input of so many tokens; 0 = none is wanted."""
        wanted_s = max(self.ttft_s, self.ttft_per_token_s * input_length)
        return min(wanted_s, self.ttft_most_s) if self.ttft_most_s else wanted_s


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    """What the calls of one submission have in common.

    `variants` lists other contexts that can serve the call too, in order of preference after its own. `gang` is the
    smallest and largest number of libraries that may run it together. `limit_s` ends a call that runs longer
    (0 = no limit; the time that a call waits for its reader does not count). With `stream` the pieces that the
    function yields travel as they come; else a call that yields has a list of them as its result. `folder` is where the
    user wants it to run (it is made if it is missing); empty: in the program's own folder, `home`, where the pilot sees
    that, else in a folder of its own. `batch` is how many items `stoker.map` puts into each call at most
    (0 = they are not packed): what a call costs is remembered with it.
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
    """One call: its id, its pickled `(args, kwargs)`, and what is known of its input."""

    call: CallId
    payload: Payload
    features: Features | None = None
    progress: bytes = b""


class FailureKind(enum.Enum):
    """Why a call ended without a result of the user's function."""

    CONTEXT = "context"
    """Its context could not be loaded."""
    PILOT = "pilot"
    """Its pilot could not do its part (its disk is full, or does not take writes): no fault of the context."""
    NO_DEVICE = "no_device"
    """No device of this site could ever hold its context."""
    POISON = "poison"
    """It killed its library again and again."""
    TIMEOUT = "timeout"
    """It ran longer than it was allowed."""
    MEMORY = "memory"
    """Its library took more memory than the recipe declares."""
    SERIALIZATION = "serialization"
    """Its function, arguments, result or exception could not be pickled or unpickled."""
    DROPPED = "dropped"
    """A policy dropped it."""
    CANCELLED = "cancelled"
    """Somebody cancelled it, or the session ended before it ran."""
    DIED = "died"
    """Its library process ended: by a signal, or because something called exit."""
    GANG = "gang"
    """Other ranks of its gang were lost, or did not come. It is started again, and ends so only after many tries."""
    INFRASTRUCTURE = "infrastructure"
    """It raised what a device, a disk or a network did to it. It runs again elsewhere, and ends so only after that has
    happened several times."""


class Printed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a call's output lies: bytes `start` to `end` of the log file `path` on its pilot. `end` is 0: to
    the end of the file."""

    path: str
    start: int
    end: int


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Evidence of a failure. `signal` is 0 unless a signal ended the process. `log` is the library's log, with the
    output of all its calls; `printed` is the part of the call that failed, and `tail` holds its last lines (of a load
    that failed: the last lines of the log). `device` names the devices that failed, where devices did."""

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
    """Files that a call of `function` left in a folder of its own, which is cleared: the first names, the count, and
    the program's folder `home`, which its pilot does not see."""

    function: str
    names: tuple[str, ...]
    count: int
    home: str = ""


class CallEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a call ended: exactly one of these reaches the client for each call that was accepted.

    `ok`: payload is the pickled result. Not `ok` and no `failure`: payload is the pickled exception that the user's
    function raised, with its traceback. Otherwise `failure` says what happened; where that is of the infrastructure,
    payload may be the pickled exception. `run_s` is the time in the function.
    `pieces`: how many pieces its run gave, all of which the client has acknowledged. `raised`: the exception in short,
    and a line for each place in the user's code, for people. `left`: the files that are lost with its folder.
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
    """What a running call says of itself: steps done of steps in all (0 = unknown), and a metric. `state` is a
    checkpoint that lets it go on elsewhere."""

    call: CallId
    done: float = 0.0
    total: float = 0.0
    metric: float = 0.0
    state: bytes = b""


class CallForecast(msgspec.Struct, frozen=True, array_like=True):
    """When a policy expects a call to end, on the manager's clock (see `Forecasts.said_at`), and whether that is before
    its deadline."""

    call: CallId
    ends_at: float
    in_time: bool


class GangPlace(msgspec.Struct, frozen=True):
    """A member's place in its gang: its rank, how many there are, and where they meet (`host:port`; empty: rank 0 will
    say where)."""

    rank: int
    size: int
    rendezvous: str = ""
