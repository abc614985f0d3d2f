"""What the pilot and the libraries that TaskVine runs for it say to each other.

Orders and answers travel inside of TaskVine's own files. Beside them there are two kinds of small files in the folder
`running` of the session, which every node sees: a *note* that says what a library is doing, for the case that it dies,
and a *stop file*, with which the pilot has a running call stopped.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.contexts.recipe import BARE, Recipe
from stoker.decoding import UNREADABLE
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure
from stoker.protocol.ids import CallId, FunctionKey

FUNCTION_FILE = "function"
"""The name of the function's pickled bytes in a call's folder."""
OVER_LIMIT = "limit"
OVER_MEMORY = "memory"
CANCELLED = "cancelled"
"""Why a call was stopped, or its process."""


class Setup(msgspec.Struct, frozen=True):
    """The settings of a library.

    Paths are the session's: `logs` is the pilot's folder, `objects` the session's for large results; `devices` are
    those of its context.
    """

    pilot: str
    logs: str
    objects: str
    running: str
    recipe: Recipe = BARE
    devices: tuple[str, ...] = ("cpu:0",)
    search_path: tuple[str, ...] = ()


class PoolOrder(msgspec.Struct, frozen=True):
    """Calls of one function for one library; no calls: it is only to say what it holds.

    `objects` are large arguments, by cache name, and the files of the call's folder that they lie in.
    """

    ticket: int
    function: FunctionKey = FunctionKey("")
    function_name: str = ""
    calls: list[CallSpec] = msgspec.field(default_factory=list)
    options: CallOptions = CallOptions()
    objects: dict[str, str] = msgspec.field(default_factory=dict)


class LibraryReport(msgspec.Struct, frozen=True):
    """A library's report on itself.

    Where it is, and the cost of its context; `failure` if it could not be loaded. `orders` counts the orders that it
    answered before.
    """

    host: str
    pid: int
    log: str
    load_s: float = 0.0
    resident_bytes: int = 0
    orders: int = 0
    failure: Failure | None = None


class PoolAnswer(msgspec.Struct, frozen=True):
    """The ends of an order's calls; empty if the context is not there."""

    ticket: int
    held: LibraryReport
    ends: list[CallEnd] = msgspec.field(default_factory=list)


class Note(msgspec.Struct, frozen=True):
    """A library's note: the running call, the place of its log, and why it is about to end itself. The output of the
    call begins at the byte `start` of the log."""

    call: int
    log: str
    reason: str = ""
    start: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_order = msgspec.msgpack.Decoder(PoolOrder).decode
decode_answer = msgspec.msgpack.Decoder(PoolAnswer).decode


def note_file(running: str, ticket: int) -> Path:
    """Where the note of an order is."""
    return Path(running) / f"order-{ticket}"


def encode_note(note: Note) -> bytes:
    """A note as it is written over the one before: whatever is left of that comes after the end of the line."""
    return msgspec.json.encode(note) + b"\n"


def take_note(running: str, ticket: int) -> Note | None:
    """Return the note of an order, and remove it; None without a note."""
    path = note_file(running, ticket)
    try:
        note = msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=Note)
    except (OSError, *UNREADABLE):
        return None
    path.unlink(missing_ok=True)
    return note


def stop_file(running: str, ticket: int, call: CallId) -> Path:
    """The file that has a call of one order stopped. The same call may run again in a later order: it is not meant."""
    return Path(running) / f"stop-{ticket}-{call}"
