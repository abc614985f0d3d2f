"""Messages of a pilot's agent to one of its libraries, over a Unix socket."""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.protocol.calls import CallOptions, CallSpec, GangPlace
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_pilot import FunctionBlob


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Load(_Message, frozen=True, tag="load"):
    """`objects`: the local path of each object. `device_memory_bytes`: the limit per device; 0: the recipe states
    none."""

    recipe: Recipe
    devices: tuple[str, ...]
    objects: dict[str, str]
    device_memory_bytes: int = 0


class Run(_Message, frozen=True, tag="run"):
    """Run these calls in order. `waited_s`: their tokens are due this much earlier."""

    function: FunctionKey
    calls: list[CallSpec]
    options: CallOptions
    function_blob: FunctionBlob | None = None
    gang: GangPlace | None = None
    objects: dict[str, str] = {}
    waited_s: float = 0.0


class GiveBack(_Message, frozen=True, tag="give-back"):
    """Give back up to `count` calls that have not started, newest first (or just these). `order`: the answer repeats
    it."""

    count: int = 0
    calls: tuple[CallId, ...] = ()
    order: int = 0


class Evict(_Message, frozen=True, tag="evict"):
    """Stop the running call with its last checkpoint, at its wait for a model or its next `stoker.progress(...)`.
    RunEvicted or the call's end answers."""

    call: CallId


class Meet(_Message, frozen=True, tag="meet"):
    """The `host:port` at which rank 0 of a call's gang waits."""

    call: CallId
    address: str


class Taken(_Message, frozen=True, tag="taken"):
    """The client has the first `upto` pieces of this run of a call."""

    call: CallId
    run: int
    upto: int


class Resize(_Message, frozen=True, tag="resize"):
    """Change the reservation of device memory. Calls the context's `resize(bytes)` if it has one."""

    device_memory_bytes: int


class Stop(_Message, frozen=True, tag="stop"):
    """Finish running calls, give back the others, exit."""


ToLibrary = Load | Run | GiveBack | Evict | Meet | Taken | Resize | Stop
