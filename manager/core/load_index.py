"""Which libraries of a context have how much to do: one structure, which answers in O(1).

Libraries that serve calls stand in *levels*: all that have a free slot in one, those whose slots are all taken by how
many calls wait in them for a slot. Within a level the one that was listed last is last: with a free slot that is the
*hottest*, the one that ended a call last, so that libraries which are not needed cool down; else the one that was given
a call last. A level is kept while somebody stands there, and there are as many as calls wait in one library at most.

A library is *closed* if its slots are all taken and no call was to wait behind those that it runs when it was listed:
they may run for hours. It stays so until it is listed anew, whatever the calls of others take meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from stoker.protocol.ids import LibraryId

CLOSED = -2
FREE = -1
FULL = 0


class IndexedLibrary(Protocol):
    """What the index needs of a library."""

    id: LibraryId


L = TypeVar("L", bound=IndexedLibrary)


class Burst(Generic[L]):
    """Calls that a library was given one after the other at one moment: they travel in one frame."""

    __slots__ = ("at", "calls", "library")

    def __init__(self, library: L, at: float, calls: int) -> None:
        self.library = library
        self.at = at
        self.calls = calls


class LoadIndex(Generic[L]):
    """See the module's text. `free`: those with a free slot, the hottest last; `burst`: what was given last."""

    __slots__ = ("_level_of", "_levels", "_order", "burst", "free")

    def __init__(self) -> None:
        # Ordered, because plain dicts find their ends in O(n).
        self.free: OrderedDict[LibraryId, L] = OrderedDict()
        self._levels: dict[int, OrderedDict[LibraryId, L]] = {CLOSED: OrderedDict(), FREE: self.free}
        self._order: list[int] = []
        """The levels from `FULL` on, in order."""
        self._level_of: dict[LibraryId, int] = {}
        self.burst: Burst[L] | None = None

    def __len__(self) -> int:
        return len(self._level_of)

    def level_of(self, library: L) -> int | None:
        """`FREE`, `CLOSED`, or how many calls wait in a library for a slot; None if it is not listed."""
        return self._level_of.get(library.id)

    # ---- changes

    def put(self, library: L, level: int) -> None:
        """List a library as the last of a level: `FREE`, `CLOSED`, or how many calls wait in it for a slot."""
        id, levels = library.id, self._levels
        before = self._level_of.get(id)
        if before == level:
            levels[level].move_to_end(id)
            return
        if before is not None:
            del levels[before][id]
            if before >= FULL and not levels[before]:
                self._close(before)
        self._level_of[id] = level
        stand = levels.get(level)
        if stand is None:
            stand = levels[level] = OrderedDict()
            insort(self._order, level)
        stand[id] = library

    def drop(self, library: L) -> None:
        """A library is listed no more."""
        level = self._level_of.pop(library.id, None)
        if level is None:
            return
        del self._levels[level][library.id]
        if level >= FULL and not self._levels[level]:
            self._close(level)

    def _close(self, level: int) -> None:
        del self._levels[level], self._order[bisect_left(self._order, level)]

    def gave(self, library: L, calls: int, now: float) -> None:
        """A library was given `calls` calls."""
        burst = self.burst
        if burst is not None and burst.library is library and burst.at == now:
            burst.calls += calls
        else:
            self.burst = Burst(library, now, calls)

    def end_burst(self, library: L) -> None:
        """A library is given nothing more for now."""
        if self.burst is not None and self.burst.library is library:
            self.burst = None

    # ---- answers

    def hottest(self) -> Iterator[L]:
        """Libraries with a free slot, the hottest first."""
        return reversed(self.free.values())

    def least_loaded(self) -> Iterator[L]:
        """Libraries whose slots are all taken and that are not closed, those with the fewest waiting calls first."""
        for level in self._order:
            yield from self._levels[level].values()

    def most_backlogged(self) -> Iterator[L]:
        """Libraries in which calls wait for a slot, those with the most first."""
        for level in reversed(self._order):
            if level > FULL:
                yield from self._levels[level].values()
