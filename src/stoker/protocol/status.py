"""What is known of a session at one moment, and of one subject of it: `show_status` writes both."""

from __future__ import annotations

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.recipe import BARE
from stoker.protocol.blocks import BlockStatus


class LibraryStatus(msgspec.Struct, frozen=True):
    """One library in `stoker status`. `state` is a LibraryState's value; memory is measured, in bytes. Of one that
    loads: since how many seconds, and what it printed last. `running` of its `slots` run a call. `batch`: how full the
    batch of its engine was last; None if its context has no engine."""

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
    """One device: its memory and the promised part of it in bytes; its cores (0: unknown)."""

    device: str
    kind: str
    memory_bytes: int
    promised_bytes: int
    libraries: tuple[int, ...]
    fault: str = ""
    cores: int = 0


class PilotStatus(msgspec.Struct, frozen=True):
    """One pilot. `ends_in_s`: walltime left, 0 = no limit; `ended`: calls that ended there; `rate`: calls per second in
    the last half minute."""

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
    """One context: how many libraries hold it or load it, what it cost, how often it was reused. `last_failure` is why
    it could not be loaded the last time, if it has not been since. `ended` counts every call that ended, however;
    `served` those that its libraries ran to their end, a gang's call once for each library.

    `arguments` are its loader's, in short. `rate`: calls that ended a second, over the last half minute; `left_s`:
    seconds until its open calls are done (as in Status)."""

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
        """The name for users: `llm-7f3a('models/small')`, or `no context` for calls without one."""
        return f"{self.name}{self.arguments}" if self.key != BARE.key else "no context"


class StoryLine(msgspec.Struct, frozen=True):
    """An event, at `at` seconds since the epoch."""

    at: float
    text: str


JOURNAL = "journal"
"""The key in `Status.trouble` for a journal that cannot be written."""


class SessionFacts(msgspec.Struct, frozen=True):
    """The whole session at one moment. Rates in calls a second over the last half minute.

    A call that has ended counts once: in `done` (with a result), `failed` or `cancelled`. `left_s`: seconds until all
    open calls are done (0 = none is open, or it is not known), counted from when the first pilot is here;
    `pilot_in_s`: until the batch system expects to start one (0 = one is here, or it does not say).

    `emptied_blocks`: those of the program's own that have brought pilots and have none now.
    `gone_pilots`: those that were here once and have left, `lost_pilots` among them, which `losses` counts by reason.
    `jobs` are blocks that the manager has asked for and that are not over, `ended_blocks` counts the others by how
    they ended; `trouble` says what is wrong with a batch system, or (`peers`) that pilots cannot reach each other, or
    (`journal`) that calls and results wait because the session's journal cannot be written. `maps`: every open map.
    `notices` say what has happened to the session itself.
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
    """An open `stoker.map` of the program with the number `client`. `total`, `done` and `kept` count items: all that it
    has (-1 = its input does not know), those with a result, and those of them whose result an earlier run has kept.
    `rate`: items a second; `left_s`: seconds until it is done, 0 = not known."""

    function: str
    client: int
    context: str
    total: int
    done: int
    kept: int
    rate: float
    left_s: float


class StoryFacts(msgspec.Struct, frozen=True):
    """Why a call, pilot, library or context is where it is. `found` is False for an unknown subject.

    Of a call: `payload` are its pickled arguments, where they are few, and `arguments` what the asker reads in them.
    `waits_for`: why it has not begun to run, in words, while that is so; `runs_in`: the libraries that have it now.
    `runs_from`: the byte of that library's log where its output begins; -1: the library runs several calls at once, and
    writes their output when they have ended."""

    subject: str
    found: bool
    headline: str
    lines: tuple[StoryLine, ...]
    payload: bytes = b""
    arguments: str = ""
    waits_for: str = ""
    runs_in: tuple[str, ...] = ()
    runs_from: int = 0
