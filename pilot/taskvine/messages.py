"""Messages between the pilot and the libraries that TaskVine runs.

TaskVine transfers orders and answers. Every node sees the session's folder `running`. It contains a *note* of each
library's activity, in case the library dies, and *stop files*, which stop running calls.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.contexts.recipe import BARE, Recipe
from stoker.decoding import UNREADABLE
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure
from stoker.protocol.ids import CallId, FunctionKey

FUNCTION_FILE = "function"
TIME_LIMIT_EXCEEDED = "limit"
MEMORY_LIMIT_EXCEEDED = "memory"
CANCELLED = "cancelled"


class VineLibrarySetup(msgspec.Struct, frozen=True):
    """Settings of a library in TaskVine. `logs`: the pilot's folder; `objects`: the folder for large results."""

    pilot: str
    logs: str
    objects: str
    running: str
    recipe: Recipe = BARE
    devices: tuple[str, ...] = ("cpu:0",)
    search_path: tuple[str, ...] = ()


class PoolOrder(msgspec.Struct, frozen=True):
    """An order to run calls of one function. Without calls, TaskVine only loads the context. `objects`: file names of
    large arguments, by cache name.
    """

    ticket: int
    function: FunctionKey = FunctionKey("")
    function_name: str = ""
    calls: list[CallSpec] = msgspec.field(default_factory=list)
    options: CallOptions = CallOptions()
    objects: dict[str, str] = msgspec.field(default_factory=dict)


class LibraryReport(msgspec.Struct, frozen=True):
    """A library's state: where it runs, how many orders it answered, and why its context failed to load."""

    host: str
    pid: int
    log: str
    load_s: float = 0.0
    resident_bytes: int = 0
    orders: int = 0
    failure: Failure | None = None


class PoolAnswer(msgspec.Struct, frozen=True):
    """The outcomes of an order's calls; empty if the context could not be loaded."""

    ticket: int
    held: LibraryReport
    ends: list[CallEnd] = msgspec.field(default_factory=list)


class LibraryNote(msgspec.Struct, frozen=True):
    """A library's note: its running call, the start of the call's output in the log, and why the library exits."""

    call: int
    log: str
    reason: str = ""
    start: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(VineLibrarySetup).decode
decode_order = msgspec.msgpack.Decoder(PoolOrder).decode
decode_answer = msgspec.msgpack.Decoder(PoolAnswer).decode


def note_file(running: str, ticket: int) -> Path:
    return Path(running) / f"order-{ticket}"


def encode_note(note: LibraryNote) -> bytes:
    return msgspec.json.encode(note) + b"\n"


def read_and_remove_note(running: str, ticket: int) -> LibraryNote | None:
    path = note_file(running, ticket)
    try:
        note = msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=LibraryNote)
    except (OSError, *UNREADABLE):
        return None
    path.unlink(missing_ok=True)
    return note


def stop_file(running: str, ticket: int, call: CallId) -> Path:
    """Return the path of the file whose creation stops only this call."""
    return Path(running) / f"stop-{ticket}-{call}"
