"""The state of a session, or of one subject in it. `show_status` writes both as text."""

from __future__ import annotations

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import BARE
from stoker.protocol.blocks import BlockStatus, NodeRecord
from stoker.protocol.calls import FailureGroup, ListedCall


class LibraryStatus(msgspec.Struct, frozen=True):
    """`state`: a LibraryState's value. Memory is measured. `loading_s`, `line`: a load's seconds so far and last output
    line. `batch`: its engine's last report.
    """

    library: int
    recipe: str
    state: str
    phase: str
    pilot: str
    devices: tuple[str, ...]
    running: int
    served: int
    memory_bytes: int
    device_bytes: int
    loading_s: float = 0.0
    line: str = ""
    slots: int = 1
    batch: EngineLoad | None = None


class DeviceStatus(msgspec.Struct, frozen=True):
    """`promised_bytes`: memory reserved for libraries. `cores`: 0 if unknown."""

    device: str
    kind: str
    memory_bytes: int
    promised_bytes: int
    libraries: tuple[int, ...]
    fault: str = ""
    cores: int = 0


class PilotStatus(msgspec.Struct, frozen=True):
    """`ends_in_s`: walltime left (0: no limit). `ended`: calls that ended on the pilot. `rate`: calls per second in the
    last 30 s.
    """

    pilot: str
    host: str
    block: str
    state: str
    devices: tuple[DeviceStatus, ...]
    folder: str
    ended: int
    rate: float
    ends_in_s: float
    source: str = ""
    objects: int = 0
    draining: str = ""


class ObjectStatus(msgspec.Struct, frozen=True):
    """Transfers of an object: pilots that hold or fetch it, and bytes by origin."""

    name: str
    size_bytes: int
    holders: int
    fetching: int
    origin_bytes: int
    peer_bytes: int
    trouble: str = ""


class KindSpeed(msgspec.Struct, frozen=True):
    """A device kind's speed for a context, relative to its fastest kind.

    `calls`: calls that ended on it in the session. `measured`: False if the speed is from earlier sessions.
    """

    kind: str
    speed: float
    fastest: str
    calls: int
    measured: bool

    @property
    def text(self) -> str:
        """`cpu: 0.31 of NVIDIA A10's speed, 120 calls`."""
        source = f"{self.calls:,} call{'s' * (self.calls != 1)}" if self.measured else "from earlier sessions"
        return f"{self.kind}: {self.speed:.2f} of {self.fastest}'s speed, {source}"


class ContextStatus(msgspec.Struct, frozen=True):
    """A context: its libraries, loads and reuse. `ended`: calls that ended in any way. `served`: calls that its
    libraries completed, a gang's call once per library. `arguments`: the loader's, as text. `speeds`: slower device
    kinds, if their speeds are known. `wake_s`: seconds that the last sleeping library took to wake (0: none has).
    `refused_offers`: calls that pilots refused, by the value of their `RefusalCase`.
    """

    key: str
    name: str
    hot: int
    loading: int
    queued: int
    running: int
    loads: int
    ended: int
    load_s: float
    load_total_s: float
    run_s: float
    run_total_s: float
    memory_bytes: int
    waits_for: str
    last_failure: str = ""
    arguments: str = ""
    rate: float = 0.0
    left_s: float = 0.0
    served: int = 0
    speeds: tuple[KindSpeed, ...] = ()
    asleep: int = 0
    wake_s: float = 0.0
    refused_offers: dict[str, int] = {}

    @property
    def title(self) -> str:
        """`llm-7f3a('models/small')`, or `no context`."""
        return f"{self.name}{self.arguments}" if self.key != BARE.key else "no context"


class StoryLine(msgspec.Struct, frozen=True):
    """`at`: seconds since 1970."""

    at: float
    text: str


class SlowCall(msgspec.Struct, frozen=True):
    """A call that returned a result after a long run. `run_s`: seconds in its function. `ended_s`: seconds since its
    end.
    """

    call: str
    function: str
    context: str
    pilot: str
    run_s: float
    ended_s: float


JOURNAL = "journal"
"""The key in `Status.trouble` for a journal that cannot be written."""


class SessionFacts(msgspec.Struct, frozen=True):
    """The whole session at one moment. Rates are calls per second over the last 30 s.

    `left_s`: seconds until all open calls are done, counted from the first pilot's start (0: none or unknown).
    `pilot_in_s`: seconds until the expected start of a pilot. `emptied_blocks`: the program's own blocks that have lost
    all their pilots. `gone_pilots` includes `lost_pilots`; `losses` counts these by reason. `jobs`: blocks that are not
    over. `ended_blocks`: numbers of blocks by kind of end. `trouble`: faults of batch systems, of connections between
    pilots (`peers`), and of the journal (`journal`), which delays calls and results. `excluded_nodes`: nodes on which
    no block may start. `failure_groups`: the largest. `longest`: the longest runs of running calls. `slowest`: the
    longest runs that ended with a result.
    """

    session: str
    uptime_s: float
    queued: int
    running: int
    done: int
    failed: int
    rate: float
    left_s: float
    pilots: tuple[PilotStatus, ...]
    libraries: tuple[LibraryStatus, ...]
    contexts: tuple[ContextStatus, ...]
    blocks: dict[str, str]
    lost_pilots: int
    rerun_calls: int
    refused: dict[str, int]
    cancelled: int = 0
    gone_pilots: int = 0
    jobs: tuple[BlockStatus, ...] = ()
    trouble: dict[str, str] = msgspec.field(default_factory=dict)
    objects: tuple[ObjectStatus, ...] = ()
    ended_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    notices: tuple[StoryLine, ...] = ()
    losses: dict[str, int] = msgspec.field(default_factory=dict)
    pilot_in_s: float = 0.0
    emptied_blocks: tuple[str, ...] = ()
    maps: tuple[MapStatus, ...] = ()
    excluded_nodes: tuple[NodeRecord, ...] = ()
    failure_groups: tuple[FailureGroup, ...] = ()
    longest: tuple[ListedCall, ...] = ()
    slowest: tuple[SlowCall, ...] = ()


class MapStatus(msgspec.Struct, frozen=True):
    """An open `stoker.map` of the program with the number `client`. `total`: all items (-1: unknown). `done`: items
    with a result. `kept`: items with an earlier run's result. `left_s`: 0 if unknown.
    """

    function: str
    client: int
    context: str
    total: int
    done: int
    kept: int
    rate: float
    left_s: float


class StoryFacts(msgspec.Struct, frozen=True):
    """Why a call, pilot, library or context is in its state.

    For a call: `payload`: its pickled arguments, if small. `arguments`: the same as text. `runs_in`: its libraries.
    `runs_from`: the byte of the library's log where its output begins (-1: the library writes output when calls end).
    """

    subject: str
    found: bool
    headline: str
    lines: tuple[StoryLine, ...]
    payload: bytes = b""
    arguments: str = ""
    waits_for: str = ""
    runs_in: tuple[str, ...] = ()
    runs_from: int = 0
