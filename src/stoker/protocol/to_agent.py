"""Messages of a library to its pilot's agent, over a Unix socket."""

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
    """Seconds and bytes (0 = not measured). `start_s`: time before the load that the pilot cannot measure. `slots`:
    concurrent calls; 0: as the recipe says."""

    load_s: float
    resident_bytes: int
    peak_bytes: int
    device_bytes: int = 0
    start_s: float | None = None
    slots: int = 0


class LoadFailed(_Message, frozen=True, tag="load-failed"):
    """The loader failed; the process exits."""

    failure: Failure


class RunsEnded(_Message, frozen=True, tag="ended"):
    ends: list[CallEnd]


class GivenBack(_Message, frozen=True, tag="given-back"):
    """Calls were not started. `need_function`: the library no longer has the function. `order`: the order that this
    answers; 0 = none."""

    calls: tuple[CallId, ...]
    need_function: bool = False
    order: int = 0


class Reports(_Message, frozen=True, tag="reports"):
    reports: list[CallProgress]


class Yielded(_Message, frozen=True, tag="yielded", gc=False):
    """Pieces of a running call: pickled, numbered from 0 within one `run`. `waits`: the call waits until all are
    acknowledged; then there may be no pieces."""

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
    device_memory_bytes: int


class SnapshotMade(_Message, frozen=True, tag="snapshot"):
    """A fast-loading form of the context is in this folder. `form` names it, the same everywhere; it took `made_s` to
    make."""

    form: str
    folder: str
    made_s: float


class BatchReport(_Message, frozen=True, tag="batch"):
    """The load of the engine's batch, and the times of its steps since the last report."""

    load: EngineLoad
    times: StepTimes = StepTimes()


ToAgent = (
    Hello | Loaded | LoadFailed | RunsEnded | GivenBack | Reports | Yielded | RunEvicted | Listens | Resized
    | SnapshotMade | BatchReport
)  # fmt: skip
