"""Measurements of a context: the number of calls in each library, the seconds per unit of work, and the run times of
functions.

*Load index*: sorts the ready libraries of a context by their number of calls, in O(1). One level contains the libraries
with a free slot. The other levels group libraries by number of waiting calls. The last library of the free level, the
*hottest*, is used first, so that libraries that are not needed stay idle. No call may wait in a *closed* library.

*Paces*: seconds per unit of work (`work_of`), by number of ranks of a gang. PromptTuner (§4.4) uses the longest
iteration, but then one slow iteration makes every job look late. Our bound is the mean plus twice the mean deviation.
For a number of ranks that was not measured, the pace follows from the nearest measured number by Amdahl's law with a
small serial part (§2.2).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from stoker.manager.core.speeds import KindRuns
from stoker.protocol.calls import Features
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.protocol.to_pilot import FunctionBlob

CLOSED = -2
FREE = -1
FULL = 0


class IndexedLibrary(Protocol):
    id: LibraryId
    kind: str


L = TypeVar("L", bound=IndexedLibrary)


@dataclass(slots=True, eq=False, repr=False)
class Burst(Generic[L]):
    """The number of calls that a library received at the same time, in one frame."""

    library: L
    at: float
    calls: int


class LoadIndex(Generic[L]):
    """Ready libraries, sorted by number of calls. `free`: libraries with a free slot, of which the last is used first.
    `of_kind`: all libraries, by device kind."""

    __slots__ = ("_level_of", "_levels", "_order", "_ranked", "_speeds", "burst", "free", "of_kind")

    def __init__(self) -> None:
        # OrderedDict, because a plain dict needs O(n) to find its first or last entry.
        self.free: OrderedDict[LibraryId, L] = OrderedDict()
        self._levels: dict[int, OrderedDict[LibraryId, L]] = {CLOSED: OrderedDict(), FREE: self.free}
        self._order: list[int] = []  # Load levels from `FULL` upwards, in ascending order
        self._level_of: dict[LibraryId, int] = {}
        self.of_kind: dict[str, dict[LibraryId, L]] = {}
        self._speeds: Mapping[str, float] = {}  # Speeds by device kind; empty if all kinds are equally fast
        self._ranked: dict[float, OrderedDict[LibraryId, L]] = {}  # Free libraries by speed, fastest first
        self.burst: Burst[L] | None = None

    def __len__(self) -> int:
        return len(self._level_of)

    def load_level_of(self, library: L) -> int | None:
        """Return `FREE`, `CLOSED`, or the number of calls that wait in the library. Return None if the library is not
        listed."""
        return self._level_of.get(library.id)

    def put(self, library: L, level: int) -> None:
        id, levels = library.id, self._levels
        before = self._level_of.get(id)
        if before == level:
            levels[level].move_to_end(id)
            if self._ranked and level == FREE:
                self._free_libraries_of_speed(library).move_to_end(id)
            return
        if before is None:
            self.of_kind.setdefault(library.kind, {})[id] = library
        else:
            del levels[before][id]
            if before >= FULL and not levels[before]:
                self._close(before)
        if self._ranked:
            if before == FREE:
                del self._free_libraries_of_speed(library)[id]
            elif level == FREE:
                self._free_libraries_of_speed(library)[id] = library
        self._level_of[id] = level
        stand = levels.get(level)
        if stand is None:
            stand = levels[level] = OrderedDict()
            insort(self._order, level)
        stand[id] = library

    def drop(self, library: L) -> None:
        level = self._level_of.pop(library.id, None)
        if level is None:
            return
        del self._levels[level][library.id]
        if level >= FULL and not self._levels[level]:
            self._close(level)
        if self._ranked and level == FREE:
            del self._free_libraries_of_speed(library)[library.id]
        of_kind = self.of_kind[library.kind]
        del of_kind[library.id]
        if not of_kind:
            del self.of_kind[library.kind]

    def _close(self, level: int) -> None:
        del self._levels[level], self._order[bisect_left(self._order, level)]

    def rank(self, speeds: Mapping[str, float]) -> None:
        self._speeds = speeds
        self._ranked = (
            {speed: OrderedDict() for speed in sorted({1.0, *speeds.values()}, reverse=True)} if speeds else {}
        )
        if speeds:
            for id, library in self.free.items():
                self._free_libraries_of_speed(library)[id] = library

    def _free_libraries_of_speed(self, library: L) -> OrderedDict[LibraryId, L]:
        return self._ranked[self._speeds.get(library.kind, 1.0)]

    def gave(self, library: L, calls: int, now: float) -> None:
        burst = self.burst
        if burst is not None and burst.library is library and burst.at == now:
            burst.calls += calls
        else:
            self.burst = Burst(library, now, calls)

    def end_burst(self, library: L) -> None:
        if self.burst is not None and self.burst.library is library:
            self.burst = None

    def hottest(self) -> Iterator[L]:
        return reversed(self.free.values())

    def free_libraries_by_speed(self) -> list[Iterator[L]]:
        """Return the free libraries of each speed, the fastest speed first. Return an empty list if all device kinds
        are equally fast.
        """
        return [reversed(free.values()) for free in self._ranked.values()]

    def least_loaded(self) -> Iterator[L]:
        """Yield libraries that have no free slot but in which calls may wait. The library with the fewest calls is
        first.
        """
        for level in self._order:
            yield from self._levels[level].values()

    def most_backlogged(self) -> Iterator[L]:
        """Yield libraries in which calls wait. The library with the most waiting calls is first."""
        for level in reversed(self._order):
            if level > FULL:
                yield from self._levels[level].values()


_NEW_WEIGHT = 0.2  # Minimum weight of the latest measurement in the mean
_SERIAL_SHARE = 0.05  # Share of the work that is not parallel (Amdahl's law), for gang sizes that were not measured
_REMEMBERED, _FEW, _KINDS = 64, 8, 64  # Ends kept of each kind, ends needed before a kind counts, number of kinds kept
_Kind = tuple[str, bool]  # Declared kind of the call, and whether work precedes its first item
_CAUTION = 2.0  # Mean deviations between the mean and the bound
LEAST_S = 0.001  # Shortest measurement in seconds: a pace of zero would mean that calls take no time
MEET_S = 2.0  # Longest time until the ranks of a gang have connected, in seconds (§5.1: at most 2 s)


class Paces:
    """Seconds per unit of work, by gang size. `meet_s`: seconds until a gang's ranks have connected."""

    __slots__ = ("_ends", "_known", "meet_s", "parts")

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float, int]] = {}  # By size: mean, mean deviation, number of measurements
        self._ends: dict[_Kind, list[float]] = {}  # By kind: the share of its items that each recent call processed
        self.parts: dict[_Kind, float] = {}  # The largest share of each kind with enough ended calls
        self.meet_s = MEET_S

    def tell(self, seconds: Mapping[int, float], *, meet_s: float = MEET_S) -> None:
        """Set paces from advice. Measurements replace them gradually."""
        self._known.update({size: (max(pace, LEAST_S / 1000), 0.0, 1) for size, pace in seconds.items()})
        self.meet_s = meet_s

    def learn(self, size: int, *, work: float, seconds: float) -> None:
        if work <= 0 or seconds < 0:
            return
        pace = max(seconds, LEAST_S) / work
        mean, deviation, count = self._known.get(size, (pace, 0.0, 0))
        weight = max(_NEW_WEIGHT, 1 / (count + 1))
        deviation += weight * (abs(pace - mean) - deviation)
        mean += weight * (pace - mean)
        self._known[size] = (mean, deviation, count + 1)

    def end(self, features: Features | None, done: float) -> None:
        """Learn which share of its items an ended call processed."""
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
        """Return the largest share of its items that a call may still process. `learn`: True if the shares of ended
        calls are used."""
        most = 1.0
        if learn and features is not None and (kind := _kind(features)) in self.parts:
            most = max((part for part in self._ends[kind] if part >= done), default=1.0)
        return max(0.0, most - done)

    def mean_s(self, size: int, work: float) -> float | None:
        """Return the expected seconds of `work` on `size` replicas; None if unmeasured."""
        return self._predict(size, work, caution=0.0)

    def bound_s(self, size: int, work: float) -> float | None:
        """Return an upper bound on the seconds of `work`, or None."""
        return self._predict(size, work, caution=_CAUTION)

    @property
    def measured(self) -> Mapping[int, tuple[float, float, int]]:
        """Seconds per unit of work, mean deviation and number of measurements, by gang size."""
        return self._known

    def _predict(self, size: int, work: float, *, caution: float) -> float | None:
        if not self._known:
            return None
        if size not in self._known:
            nearest = min(self._known, key=lambda known: (abs(math.log(known / size)), known))
            scale = _time_relative_to_one_replica(size) / _time_relative_to_one_replica(nearest)
        else:
            nearest, scale = size, 1.0
        mean, deviation, _ = self._known[nearest]
        return work * scale * (mean + caution * deviation) + (self.meet_s if size > 1 else 0.0)


def _kind(features: Features) -> _Kind:
    return features.kind, features.fixed_s + features.shared_s > 0


def work_of(features: Features | None) -> float:
    """Return the amount of work of a call in tokens, or in items if the length of the items is unknown."""
    return float(features.items * max(1, features.input_length)) if features is not None else 1.0


def _time_relative_to_one_replica(size: int) -> float:
    return _SERIAL_SHARE + (1 - _SERIAL_SHARE) / size


@dataclass(slots=True, eq=False, repr=False)
class Cost:
    function: FunctionBlob
    recipe: RecipeKey
    runs: int = 0
    run_s: float = 0.0
    ordered_s: float = 0.0  # Expected run time of a call in seconds, when the queue was last sorted
    least_s: float = math.inf  # Shortest mean run time of calls that ended together, in seconds
    by_kind: dict[str, KindRuns] = field(default_factory=dict)
