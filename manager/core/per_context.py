"""Measures that each context keeps: the load of its libraries, paces of its work, costs of its functions.

Which libraries of a context have how much to do: one structure, which answers in O(1).

Libraries that serve calls stand in *levels*: all that have a free slot in one, those whose slots are all taken by how
many calls wait in them for a slot. Within a level the one that was listed last is last: with a free slot that is the
*hottest*, the one that ended a call last, so that libraries which are not needed cool down; else the one that was given
a call last. A level is kept while somebody stands there, and there are as many as calls wait in one library at most.

A library is *closed* if its slots are all taken and no call was to wait behind those that it runs when it was listed:
they may run for hours. It stays so until it is listed anew, whatever the calls of others take meanwhile.

How long a context's work takes on one replica, two, or more: what schedulers of gangs predict with.

A call says how much work it is (`work_of`), and what was measured is seconds for a unit of it, by the size of the gang
that did it. PromptTuner (§4.4) predicts a job's time as its iterations at most times the most that one takes; a single
odd iteration would make every job look hopeless for ever, so the most is here the mean and twice the mean deviation,
over the last measurements.

How much of its work a call does is learned as well. Its items are a bound (iterations at most), and one that has
reached its target ends before; those that began by looking for a good start (`Features.shared_s`) sooner than others,
and whatever else a `Features.kind` tells apart. The paper predicts with the bound. When asked, `left` takes the most
that any of the last calls of its kind did instead.

A size that was never measured is told from the nearest one that was, by Amdahl's law with a small serial part: prompt
tuning scales almost linearly (§2.2), but a promise should not count on the last few percent.

What runs of functions have cost.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from stoker.protocol.calls import Features
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.protocol.to_pilot import FunctionBlob

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
        self._order: list[int] = []  # The levels from `FULL` on, in order
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


# ---- paces
_NEW_WEIGHT = 0.2  # The mean follows the last measurements with at least this weight
_SERIAL = 0.05  # What of a unit's time no second replica takes away, until it is measured
_REMEMBERED, _FEW, _KINDS = 64, 8, 64  # Ends kept of each kind, ends needed before a kind counts, and kinds kept
_Kind = tuple[str, bool]  # What a call says of itself, and whether it does something before its first item
_CAUTION = 2.0  # So many mean deviations above the mean is called a bound
LEAST_S = 0.001  # Shortest measurement: a pace of zero would say that a call takes no time
MEET_S = 2.0  # What a gang of several may take until its ranks have met (§5.1: at most 2 s)


class Paces:
    """Seconds for a unit of work by gang size, each with its mean deviation. `meet_s`: what meeting takes in seconds,
    for gangs of several."""

    __slots__ = ("_ends", "_known", "meet_s", "parts")

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float, int]] = {}  # By size: mean, mean absolute deviation, measurements
        self._ends: dict[_Kind, list[float]] = {}  # Which part of its items each of the last calls of a kind did
        self.parts: dict[_Kind, float] = {}  # The largest of these, of kinds of which enough have ended
        self.meet_s = MEET_S

    def tell(self, seconds: Mapping[int, float], *, meet_s: float = MEET_S) -> None:
        """What is known beforehand (a profile): seconds for a unit by size. Measurements move it like any other."""
        self._known.update({size: (max(pace, LEAST_S / 1000), 0.0, 1) for size, pace in seconds.items()})
        self.meet_s = meet_s

    def learn(self, size: int, *, work: float, seconds: float) -> None:
        """So much work took a gang of this size so long, meeting not counted."""
        if work <= 0 or seconds < 0:
            return
        pace = max(seconds, LEAST_S) / work
        mean, deviation, count = self._known.get(size, (pace, 0.0, 0))
        weight = max(_NEW_WEIGHT, 1 / (count + 1))
        deviation += weight * (abs(pace - mean) - deviation)
        mean += weight * (pace - mean)
        self._known[size] = (mean, deviation, count + 1)

    def end(self, features: Features | None, done: float) -> None:
        """A call has ended well after `done` of its items."""
        if features is not None and features.items:
            kind = _kind(features)
            ends = self._ends.setdefault(kind, [])
            ends.append(min(1.0, done / features.items))
            del ends[:-_REMEMBERED]
            if len(ends) >= _FEW:
                self.parts[kind] = max(ends)
            if len(self._ends) > _KINDS:
                oldest = next(iter(self._ends))
                del self._ends[oldest]
                self.parts.pop(oldest, None)

    def share_left(self, features: Features | None, done: float = 0.0, *, learn: bool = True) -> float:
        """The part of its items that a call has still to do at most, when it has done this part. `learn`: at most as
        the last of its kind that did as much; all of them while too few have ended."""
        most = 1.0
        if learn and features is not None and (kind := _kind(features)) in self.parts:
            most = max((part for part in self._ends[kind] if part >= done), default=1.0)
        return max(0.0, most - done)

    def mean_s(self, size: int, work: float) -> float | None:
        """Seconds that `work` units take on `size` replicas, with their meeting; None while nothing was measured."""
        return self._predict(size, work, caution=0.0)

    def bound_s(self, size: int, work: float) -> float | None:
        """The most that it should take."""
        return self._predict(size, work, caution=_CAUTION)

    @property
    def measured(self) -> Mapping[int, tuple[float, float, int]]:
        """By size: seconds for a unit, their mean absolute deviation, and how often that was measured."""
        return self._known

    def _predict(self, size: int, work: float, *, caution: float) -> float | None:
        if not self._known:
            return None
        if size not in self._known:
            nearest = min(self._known, key=lambda known: (abs(math.log(known / size)), known))
            scale = _share(size) / _share(nearest)
        else:
            nearest, scale = size, 1.0
        mean, deviation, _ = self._known[nearest]
        return work * scale * (mean + caution * deviation) + (self.meet_s if size > 1 else 0.0)


def _kind(features: Features) -> _Kind:
    return features.kind, features.fixed_s + features.shared_s > 0


def work_of(features: Features | None) -> float:
    """A call's work in units: tokens where it says how many an item has, else items."""
    return float(features.items * max(1, features.input_length)) if features is not None else 1.0


def _share(size: int) -> float:
    """The time of `size` replicas for a unit, as a part of one replica's time (Amdahl)."""
    return _SERIAL + (1 - _SERIAL) / size


# ---- cost
class Cost:
    """What runs of one function on one context have cost, whoever asked for them and how."""

    __slots__ = ("by_kind", "function", "least_s", "ordered_s", "recipe", "run_s", "runs")

    def __init__(self, function: FunctionBlob, recipe: RecipeKey) -> None:
        self.function = function
        self.recipe = recipe
        self.runs = 0
        self.run_s = 0.0
        self.ordered_s = 0.0  # What a run was expected to take when the queue was put into order last
        self.least_s = math.inf  # Least mean run time of calls that ended together
        self.by_kind: dict[str, list[float]] = {}  # Unrecorded number, seconds and items of runs, by device kind
