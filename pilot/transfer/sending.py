"""Which pieces a server may send to one more peer just now.

A piece that is on its way to one peer is not sent to another at the same time: the other is told "later", and may have
it from the first by then. The pilot that reads an object's origin goes further: as long as it reads, it gives each
piece away once, and again only to who still asks after a while. So of a new piece that four peers wait for, one copy
leaves, and its receiver has it for the others; without that the reader's link, which every piece has to pass, is filled
with copies of the same. (BitTorrent's super-seeding reaches this by showing each peer other pieces.)

The session's seed does the same with what pilots fetch that start together, although it has all of it: its host serves
everybody, and theirs do not. How long it keeps a piece back, `meeting` says, which knows who of them has it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stoker.pilot.transfer.copy import ObjectCopy

_LATER_S = 3.0
"""A piece that one peer takes so long to take may go to another as well."""
_PATIENCE_S, _PATIENCE = 1.0, 8.0
"""How long a reader keeps a piece back that it has given away: so long, and so many times what sending one takes."""
_POLL_S = 0.1
Spares = Callable[[str, int, str], float]
"""Takes an object's name, a piece's index, and the address of the host that asks for it; answers with seconds."""
_REMEMBERED = 256


class Sending:
    """Which pieces are being sent, and which were (see the module's text). Any thread may use it.

    `spares` says for how many seconds a piece that was given away had better come from who has it; 0 = from here.
    """

    def __init__(self, *, spares: Spares = lambda _name, _index, _host: 0.0) -> None:
        self._spares = spares
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}

    def begin(self, copy: ObjectCopy, index: int, *, host: str = "") -> bool:
        """Whether this piece may be sent to one more peer now; if so it counts as being sent."""
        now = time.monotonic()
        with self._lock:
            object = self._objects.setdefault(copy.name, _Object())
            sent = object.pieces.setdefault(index, _Sent())
            if object.free_at(copy, sent, now, spared_s=self._spares(copy.name, index, host)) > now:
                return False
            object.under_way += sent.since is None
            object.given += not sent.before
            sent.since, sent.before, sent.asked_at = now, True, None
            return True

    def end(self, copy: ObjectCopy, index: int) -> None:
        """It has been sent, or not, as far as it could be."""
        now = time.monotonic()
        with self._lock:
            object = self._objects.setdefault(copy.name, _Object())
            sent = object.pieces.setdefault(index, _Sent())
            if sent.since is not None:  # else it went to two at once, and the other was first
                object.took_s = now - sent.since
                object.under_way -= 1
                sent.since = None
            if len(self._objects) > _REMEMBERED:
                self._objects = {name: one for name, one in self._objects.items() if one.under_way}

    def free_in(self, copy: ObjectCopy, index: int, *, host: str = "") -> float:
        """Seconds until this piece may be sent to one more peer, as far as that can be told."""
        now = time.monotonic()
        with self._lock:
            object = self._objects.setdefault(copy.name, _Object())
            sent = object.pieces.setdefault(index, _Sent())
            return object.free_at(copy, sent, now, spared_s=self._spares(copy.name, index, host)) - now


class _Object:
    """One object that is served: its pieces that were sent, how many are on their way, and what sending one took."""

    __slots__ = ("given", "pieces", "took_s", "under_way")

    def __init__(self) -> None:
        self.pieces: dict[int, _Sent] = {}
        self.given = 0
        """Pieces that were sent at least once."""
        self.under_way = 0
        self.took_s = 0.0

    def free_at(self, copy: ObjectCopy, sent: _Sent, now: float, *, spared_s: float) -> float:
        """When this piece may be sent to one more peer."""
        if sent.since is not None:
            return sent.since + _LATER_S
        if not sent.before or not (spared_s or (copy.first_hand and not copy.complete)):
            return now
        if not spared_s and self.given >= len(copy.arrivals) and self.under_way <= 1:
            return now  # there is nothing better to send
        sent.asked_at = sent.asked_at or now
        due = sent.asked_at + (spared_s or _PATIENCE_S) + _PATIENCE * self.took_s
        return now if due <= now else min(due, now + _POLL_S)  # there may be nothing better to send soon


class _Sent:
    """One piece: since when it is being sent, whether it was sent before, and since when it is asked for again."""

    __slots__ = ("asked_at", "before", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.before = False
        self.asked_at: float | None = None
