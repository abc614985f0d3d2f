"""A program that uses the session, as the manager knows it."""

from __future__ import annotations

from collections import deque

from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import ClientId
from stoker.protocol.pace import WorkPace
from stoker.protocol.to_manager import MapReport
from stoker.protocol.wire import Inbox


class MapRecord:
    """The last report of an open map, and its pace."""

    __slots__ = ("began_at", "pace", "report")

    def __init__(self, report: MapReport, *, now: float) -> None:
        self.began_at = now
        self.report = report
        self.pace = WorkPace(now)


class Client:
    """Somebody who submits calls."""

    __slots__ = (
        "connected", "defined", "factory", "first_unacked", "gone", "gone_at", "id", "inbox", "known_ends", "last_call",
        "maps", "number", "observer", "open_calls", "refusals", "unacked", "unnamed",
    )  # fmt: skip

    def __init__(self, id: ClientId, *, number: int, observer: bool) -> None:
        self.id = id
        self.number = number
        self.observer = observer
        self.factory = False
        """Whether it is the one that submits blocks."""
        self.connected = True
        self.gone = False
        self.gone_at = 0.0
        self.inbox = Inbox()
        self.unacked: deque[CallEnd] = deque()
        self.first_unacked = 0
        self.defined: set[str] = set()
        """Keys of the functions and recipes that it has defined."""
        self.refusals = 0
        """How many of its events made the core raise."""
        self.known_ends: int | None = None
        """From a restart of the manager to the client's next hello: how many ends the journal knew of."""
        self.unnamed: set[int] | None = None
        """While the client submits its calls again: those that it has not named yet, of its calls that are open or have
        ended since the manager came back. It is told of no end meanwhile."""
        self.last_call = -1
        """The highest id among its calls."""
        self.maps: dict[int, MapRecord] = {}
        """Its open maps, as it reports them."""
        self.open_calls = 0
