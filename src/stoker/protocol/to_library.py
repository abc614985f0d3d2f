"""Messages from a pilot's agent to a library."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.protocol.calls import CallOptions, CallSpec, GangPlace, Message
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_pilot import FunctionBlob


class Load(Message, frozen=True, tag="load"):
    """Load the context. `objects`: local path of each object. `device_memory_bytes`: limit per device (0: none)."""

    recipe: Recipe
    devices: tuple[str, ...]
    objects: dict[str, str]
    device_memory_bytes: int = 0


class Run(Message, frozen=True, tag="run"):
    """Run calls. `waited_s`: seconds that the calls have waited; their token deadlines are earlier by this time."""

    function: FunctionKey
    calls: list[CallSpec]
    options: CallOptions
    function_blob: FunctionBlob | None = None
    gang: GangPlace | None = None
    objects: dict[str, str] = msgspec.field(default_factory=dict)
    waited_s: float = 0.0


class GiveBack(Message, frozen=True, tag="give-back"):
    """Return the unstarted calls among `calls`, or up to `count` unstarted calls, newest first. `GivenBack` repeats
    `order`."""

    count: int = 0
    calls: tuple[CallId, ...] = ()
    order: int = 0


class Evict(Message, frozen=True, tag="evict"):
    """Stop a running call when it next waits for a model or reports progress. The library answers with RunEvicted (with
    the last checkpoint) or RunsEnded."""

    call: CallId


class MeetRankZero(Message, frozen=True, tag="meet"):
    """Rank 0 of the call's gang waits at `address` (`host:port`)."""

    call: CallId
    address: str


class PiecesReceived(Message, frozen=True, tag="taken"):
    """The client has received the first `upto` result pieces of run number `run` of a call."""

    call: CallId
    run: int
    upto: int


class Resize(Message, frozen=True, tag="resize"):
    """Change the device memory that is reserved for the library."""

    device_memory_bytes: int


class Sleep(Message, frozen=True, tag="sleep"):
    """Call the context's `sleep`. The library answers with Slept or SleepFailed."""


class Wake(Message, frozen=True, tag="wake"):
    """Call the context's `wake`. The library answers with Woke or SleepFailed."""


class Stop(Message, frozen=True, tag="stop"):
    """Finish running calls, return all other calls, and exit."""


ToLibrary = Load | Run | GiveBack | Evict | MeetRankZero | PiecesReceived | Resize | Sleep | Wake | Stop
