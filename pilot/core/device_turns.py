"""Whose turn is it on a device? The libraries that share devices compute an iteration at a time.

An iteration is a step of an engine, or a call of a library that has none, from its beginning to its end. Of those that
wait, the library with the shortest headroom goes first (SLINFER §VI-A, eq. 1): the time until the most urgent token of
its requests is due. A library that takes several devices begins when all of them are free, and until then no library
behind it begins on any of them.

Headroom alone can starve a library: beside one whose tokens are late, and get later with each iteration, nobody else
would ever have a turn, and a call that nobody waits for has an infinite headroom. So what counts is when the token is
due, but never a time before the library has asked for its turn, nor `PATIENCE_S` or more after that. Libraries that
are late take turns; and a library that has waited for `PATIENCE_S` goes before all that ask after that time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from stoker.protocol.ids import DeviceId, LibraryId

PATIENCE_S = 8.0
"""The longest time to first token that SLINFER promises (§IV-A): no headroom counts as longer."""


class TurnRequest(NamedTuple):
    """A library that waits for a turn on all of these devices. `due_at`: when its most urgent token is due (infinity:
    nobody waits for it); `since`: when it has asked. Seconds of one clock."""

    library: LibraryId
    devices: tuple[DeviceId, ...]
    due_at: float
    since: float


def next_turns(requests: Iterable[TurnRequest], busy: Collection[DeviceId]) -> list[LibraryId]:
    """The libraries that begin an iteration now, while others compute on the devices that are `busy`."""
    taken, chosen = set(busy), list[LibraryId]()
    for request in sorted(requests, key=_rank):
        if taken.isdisjoint(request.devices):
            chosen.append(request.library)
        taken.update(request.devices)
    return chosen


def _rank(request: TurnRequest) -> tuple[float, float, LibraryId]:
    """Smaller goes first: when its turn should come at the latest, then since when it has asked."""
    library, _, due_at, since = request
    if due_at < since:
        due_at = since
    elif due_at > since + PATIENCE_S:
        due_at = since + PATIENCE_S
    return due_at, since, library
