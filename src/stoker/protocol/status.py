"""The state of a session, or of one call, pilot, library or context. `show_status` formats this state as text."""

from __future__ import annotations

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import BARE
from stoker.protocol.blocks import BlockStatus, NodeRecord
from stoker.protocol.calls import FailureGroup, ListedCall


class LibraryStatus(msgspec.Struct, frozen=True):
    """A library. `state`: value of a LibraryState. Sizes in bytes are measured. `loading_s`: seconds since a load
    began. `line`: last output line of this load. `batch`: last report of the library's inference engine.
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
    """A device. `promised_bytes`: memory reserved for libraries. `cores`: 0 if unknown."""

    device: str
    kind: str
    memory_bytes: int
    promised_bytes: int
    libraries: tuple[int, ...]
    fault: str = ""
    cores: int = 0


class PilotStatus(msgspec.Struct, frozen=True):
    """A pilot. `ends_in_s`: walltime left (0: no limit). `ended`: number of calls that ended on the pilot. `rate`:
    calls per second in the last 30 s."""

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
    """Transfers of an object. `holders`, `fetching`: numbers of pilots that have it and that fetch it. `origin_bytes`,
    `peer_bytes`: bytes read from the origin, and from other pilots.
    """

    name: str
    size_bytes: int
    holders: int
    fetching: int
    origin_bytes: int
    peer_bytes: int
    trouble: str = ""


class KindSpeed(msgspec.Struct, frozen=True):
    """The speed of a device kind for a context, relative to the fastest kind. `calls`: number of calls that ended on
    this kind in the session. `measured`: False if the speed is from earlier sessions."""

    kind: str
    speed: float
    fastest: str
    calls: int
    measured: bool

    @property
    def text(self) -> str:
        """Text for users: `cpu: 0.31 of NVIDIA A10's speed, 120 calls`."""
        source = f"{self.calls:,} call{'s' * (self.calls != 1)}" if self.measured else "from earlier sessions"
        return f"{self.kind}: {self.speed:.2f} of {self.fastest}'s speed, {source}"


class ContextStatus(msgspec.Struct, frozen=True):
    """A context, with its libraries, loads and calls. `ended`: calls that ended in any way. `served`: calls that
    libraries completed (a gang's call counts once per library). `arguments`: the loader's arguments as text. `speeds`:
    speeds of slower device kinds. `wake_s`: seconds of the last wake (0: no wake). `refused_offers`: refused offers
    by value of `RefusalCase`."""

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
        """Name and arguments of the context for users: `llm-7f3a('models/small')`, or `no context`."""
        return f"{self.name}{self.arguments}" if self.key != BARE.key else "no context"


class StoryLine(msgspec.Struct, frozen=True):
    """A line of `stoker explain`. `at`: seconds since 1970."""

    at: float
    text: str


class SlowCall(msgspec.Struct, frozen=True):
    """A call that returned a result after `run_s` seconds in the function and ended `ended_s` seconds ago."""

    call: str
    function: str
    context: str
    pilot: str
    run_s: float
    ended_s: float


JOURNAL = "journal"
"""Key in `Status.trouble` for the error message of a journal that cannot be written."""


class SessionFacts(msgspec.Struct, frozen=True):
    """The state of the whole session. Rates are calls per second over the last 30 s. `left_s`: seconds from the start
    of the first pilot until all open calls are done (0: unknown). `pilot_in_s`: seconds until the expected start of a
    pilot. `emptied_blocks`: blocks that programs started and that have lost all their pilots. `gone_pilots`: ended
    pilots, including `lost_pilots`. `losses`: number of lost pilots by reason. `jobs`: blocks that have not ended.
    `ended_blocks`: number of ended blocks by kind of end. `trouble`: faults of batch systems, of connections between
    pilots (key `peers`), and of the journal (key `journal`). Journal faults delay calls and results. `longest`: running
    calls that have run longest. `slowest`: successful calls that ran longest.
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
    """The progress of an open `stoker.map`, in items. `client`: number of the client. `total`: -1 if unknown. `kept`:
    number of items whose result an earlier run computed. `left_s`: remaining seconds (0: unknown).
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
    """The reasons why a call, pilot, library or context is in its state. For calls, `payload` contains the pickled
    arguments if they are small. `arguments`: arguments as text. `runs_in`: libraries that run the call. `runs_from`:
    start of the call's output in the library's log, in bytes (-1: output is written when calls end).
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
