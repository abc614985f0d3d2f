"""Messages from a library to the agent of its pilot."""

from __future__ import annotations

from stoker.contexts.inference.adapter import EngineLoad, TokenCache
from stoker.contexts.step_times import StepTimes
from stoker.protocol.calls import CallEnd, CallProgress, Failure, Message
from stoker.protocol.ids import CallId


class Hello(Message, frozen=True, tag="hello"):
    library: int
    pid: int


class Loaded(Message, frozen=True, tag="loaded"):
    """The library has loaded its context. Byte counts are 0 if not measured. `start_s`: seconds from the agent's order
    to the start of the load (None: the pilot measures them). `slots`, `cache`, `sleeps`: see `to_manager.LibraryReady`.
    """

    load_s: float
    resident_bytes: int
    peak_bytes: int
    device_bytes: int = 0
    start_s: float | None = None
    slots: int = 0
    cache: TokenCache | None = None
    sleeps: bool = False


class LoadFailed(Message, frozen=True, tag="load-failed"):
    """The loader failed. The library's process exits."""

    failure: Failure


class RunsEnded(Message, frozen=True, tag="ended"):
    ends: list[CallEnd]


class GivenBack(Message, frozen=True, tag="given-back"):
    """Unstarted calls that the library returns. `need_function`: True if it lacks the function of these calls. `order`:
    number of the `GiveBack` that this message answers (0: none).
    """

    calls: tuple[CallId, ...]
    need_function: bool = False
    order: int = 0


class Reports(Message, frozen=True, tag="reports"):
    reports: list[CallProgress]


class Yielded(Message, frozen=True, tag="yielded", gc=False):
    """Pickled pieces of the result of a running call. Pieces of each run of the call (`run`) are numbered from 0.
    `waits`: True if the call waits until all pieces are acknowledged.
    """

    call: CallId
    run: int
    first: int
    items: list[bytes]
    waits: bool = False


class RunEvicted(Message, frozen=True, tag="evicted"):
    """A running call was checkpointed and stopped."""

    progress: CallProgress


class RankZeroListens(Message, frozen=True, tag="listens"):
    """Rank 0 of a gang waits for the other ranks at `port` of its host."""

    call: CallId
    port: int


class Resized(Message, frozen=True, tag="resized"):
    device_memory_bytes: int


class Slept(Message, frozen=True, tag="slept"):
    """The library sleeps. `resident_bytes`: host memory of its process. `more_bytes`: growth of this memory because of
    the sleep. `device_bytes`: memory that PyTorch still uses on the fullest device.
    """

    resident_bytes: int
    more_bytes: int = 0
    device_bytes: int = 0
    sleep_s: float = 0.0


class Woke(Message, frozen=True, tag="woke"):
    wake_s: float


class SleepFailed(Message, frozen=True, tag="sleep-failed"):
    """The context's `sleep` or `wake` raised an exception. The library's process exits."""

    failure: Failure


class SnapshotMade(Message, frozen=True, tag="snapshot"):
    """The library has written a snapshot. `form`: name of the snapshot's format, equal on all pilots."""

    form: str
    folder: str
    made_s: float


class BatchReport(Message, frozen=True, tag="batch"):
    load: EngineLoad
    times: StepTimes = StepTimes()


ToAgent = (
    Hello | Loaded | LoadFailed | RunsEnded | GivenBack | Reports | Yielded | RunEvicted | RankZeroListens | Resized
    | SnapshotMade | BatchReport | Slept | Woke | SleepFailed
)  # fmt: skip
