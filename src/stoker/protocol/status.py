"""The facts about a session, or one subject of it, at one moment. `show_status` writes both as text."""

from __future__ import annotations

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import BARE
from stoker.protocol.blocks import BlockStatus


class LibraryStatus(msgspec.Struct, frozen=True):
    """`state`: a LibraryState's value; memory is measured. For a loading one: the seconds so far and its last output.
    `batch`: the last load of its engine's batch."""

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
    """`promised_bytes`: the promised part of its memory; `cores`: 0 = unknown."""

    device: str
    kind: str
    memory_bytes: int
    promised_bytes: int
    libraries: tuple[int, ...]
    fault: str = ""
    cores: int = 0


class PilotStatus(msgspec.Struct, frozen=True):
    """`ends_in_s`: walltime left, 0 = no limit; `ended`: calls that ended there; `rate`: calls per second in the last
    half minute."""

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
    """Transfers of an object: pilots that hold or fetch it, bytes read from its origin and from pilots."""

    name: str
    size_bytes: int
    holders: int
    fetching: int
    origin_bytes: int
    peer_bytes: int
    trouble: str = ""


class ContextStatus(msgspec.Struct, frozen=True):
    """One context: its libraries, the cost of loads, and its reuse. `ended`: calls that ended in any way; `served`:
    calls that its libraries completed, a gang's call once per library. `arguments`: of its loader, in short. `rate`,
    `left_s`: as in Status."""

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

    @property
    def title(self) -> str:
        """`llm-7f3a('models/small')`, or `no context`."""
        return f"{self.name}{self.arguments}" if self.key != BARE.key else "no context"


class StoryLine(msgspec.Struct, frozen=True):
    """An event, at `at` seconds since the epoch."""

    at: float
    text: str


JOURNAL = "journal"
"""The key in `Status.trouble` for a journal that cannot be written."""


class SessionFacts(msgspec.Struct, frozen=True):
    """The whole session at one moment. Rates in calls per second over the last half minute.

    An ended call counts once: in `done`, `failed` or `cancelled`. `left_s`: seconds until all open calls are done (0 =
    none, or unknown), counted from when the first pilot is here; `pilot_in_s`: until the batch system expects to start
    one. `emptied_blocks`: the program's own blocks that have lost all their pilots. `gone_pilots` include
    `lost_pilots`, by reason in `losses`. `jobs`: blocks that are not over; `ended_blocks` counts the others by how they
    ended. `trouble`: faults of batch systems, of connections between pilots (`peers`), or of the journal (`journal`),
    which delays calls and results.
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


class MapStatus(msgspec.Struct, frozen=True):
    """An open `stoker.map` of the program with the number `client`. `total`, `done` and `kept` count items: all (-1 =
    unknown), those with a result, and with an earlier run's. `rate`: items per second; `left_s`: 0 = unknown."""

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

    For a call: `payload`: its pickled arguments, if small; `arguments`: the same as text. `runs_in`: its libraries.
    `runs_from`: the byte of that library's log where its output begins; -1: the library runs several calls at once and
    writes their output when they end.
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
