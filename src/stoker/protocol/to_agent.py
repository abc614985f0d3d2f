"""What a library says to its pilot's agent, over a Unix socket."""

from __future__ import annotations

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.step_times import StepTimes
from stoker.protocol.calls import CallEnd, CallProgress, Failure
from stoker.protocol.ids import CallId


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """The library process is up."""

    library: int
    pid: int


class Loaded(_Message, frozen=True, tag="loaded"):
    """The context is loaded. Seconds and bytes (0 = not measured). `start_s`: what passed before the load, where its
    pilot cannot count that by itself. `slots`: calls that it runs at once; 0: as many as its recipe says."""

    load_s: float
    resident_bytes: int
    peak_bytes: int
    device_bytes: int = 0
    start_s: float | None = None
    slots: int = 0


class LoadFailed(_Message, frozen=True, tag="load-failed"):
    """The loader did not give a context; the process ends by itself."""

    failure: Failure


class RunsEnded(_Message, frozen=True, tag="ended"):
    """Calls that have ended."""

    ends: list[CallEnd]


class GivenBack(_Message, frozen=True, tag="given-back"):
    """Calls that were not begun. `need_function`: because the function was no longer in the library's cache. `order`:
    the number of the order that this answers; 0 = none."""

    calls: tuple[CallId, ...]
    need_function: bool = False
    order: int = 0


class Reports(_Message, frozen=True, tag="reports"):
    """Progress of running calls."""

    reports: list[CallProgress]


class Yielded(_Message, frozen=True, tag="yielded", gc=False):
    """Pieces that a running call has yielded: pickled, numbered from 0 within one `run` of the call. `first`: the
    number of the first of them. `waits`: the call waits until all are acknowledged; there may be no pieces with that.
    """

    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class RunEvicted(_Message, frozen=True, tag="evicted"):
    """The running call was checkpointed and stopped."""

    progress: CallProgress


class Listens(_Message, frozen=True, tag="listens"):
    """Rank 0 of a call's gang awaits the others at this port of its host."""

    call: CallId
    port: int


class Resized(_Message, frozen=True, tag="resized"):
    """The reservation has changed."""

    device_memory_bytes: int


class SnapshotMade(_Message, frozen=True, tag="snapshot"):
    """The context that is being loaded lies in this folder in a form that loads fast; other pilots could use it.

    `form` names it the same everywhere; it took `made_s` seconds to make.
    """

    form: str
    folder: str
    made_s: float


class BatchReport(_Message, frozen=True, tag="batch"):
    """How full the batch of the context's engine is, and what its steps took since the last report."""

    load: EngineLoad
    times: StepTimes = StepTimes()


ToAgent = (
    Hello | Loaded | LoadFailed | RunsEnded | GivenBack | Reports | Yielded | RunEvicted | Listens | Resized
    | SnapshotMade | BatchReport
)  # fmt: skip
