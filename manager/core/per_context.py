"""Measurements of a context: calls in each library, seconds per unit of work, run times, and speeds of device kinds.

*Load index*: sorts the ready libraries of a context by their number of calls, in O(1). One level contains the libraries
with a free slot. The other levels contain the libraries with an equal number of waiting calls. Policies use the last
library of the free level, the *hottest*, first. So libraries that are not needed stay idle. No call may wait in a
*closed* library.

*Paces*: seconds per unit of work (`amount_of_work`), by number of ranks of a gang. PromptTuner (§4.4) uses the longest
iteration, but then one slow iteration makes every job look late. Our bound is the mean plus twice the mean deviation.
For a number of ranks that was not measured, the pace is scaled from the nearest measured number by Amdahl's law with a
small serial part (§2.2).

*Speeds*: only calls of the same function with the same number of items are compared. A *round* ends when two device
kinds have each run `_CALLS_PER_ROUND` of these calls. It yields the ratio of their mean run times. The ratio of two
device kinds is the median over the latest rounds, so that one unusual round changes little. Two kinds count as equally
fast until there are `_MIN_ROUNDS` rounds and a 95 % confidence interval of the median excludes 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from stoker.contexts.speeds import DeviceKindPair, compute_relative_speeds
from stoker.protocol.calls import Features
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.protocol.to_pilot import FunctionBlob

# ---- load index
CLOSED = -2
FREE = -1
FULL = 0


class IndexedLibrary(Protocol):
    id: LibraryId
    kind: str


L = TypeVar("L", bound=IndexedLibrary)


@dataclass(slots=True, eq=False, repr=False)
class Burst(Generic[L]):
    """Number of calls that were sent to a library at the same time, in one frame."""

    library: L
    at: float
    calls: int


class LoadIndex(Generic[L]):
    """Ready libraries, sorted by number of calls. `free`: libraries with a free slot. `of_kind`: all libraries, by
    device kind.
    """

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
        """Return `FREE`, `CLOSED`, or the number of calls that wait in the library; None if it is not in the index."""
        return self._level_of.get(library.id)

    def set_level(self, library: L, level: int) -> None:
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
                self._remove_empty_level(before)
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

    def remove_library(self, library: L) -> None:
        level = self._level_of.pop(library.id, None)
        if level is None:
            return
        del self._levels[level][library.id]
        if level >= FULL and not self._levels[level]:
            self._remove_empty_level(level)
        if self._ranked and level == FREE:
            del self._free_libraries_of_speed(library)[library.id]
        of_kind = self.of_kind[library.kind]
        del of_kind[library.id]
        if not of_kind:
            del self.of_kind[library.kind]

    def _remove_empty_level(self, level: int) -> None:
        del self._levels[level], self._order[bisect_left(self._order, level)]

    def set_speeds(self, speeds: Mapping[str, float]) -> None:
        self._speeds = speeds
        self._ranked = (
            {speed: OrderedDict() for speed in sorted({1.0, *speeds.values()}, reverse=True)} if speeds else {}
        )
        if speeds:
            for id, library in self.free.items():
                self._free_libraries_of_speed(library)[id] = library

    def _free_libraries_of_speed(self, library: L) -> OrderedDict[LibraryId, L]:
        return self._ranked[self._speeds.get(library.kind, 1.0)]

    def record_burst(self, library: L, calls: int, now: float) -> None:
        burst = self.burst
        if burst is not None and burst.library is library and burst.at == now:
            burst.calls += calls
        else:
            self.burst = Burst(library, now, calls)

    def end_burst(self, library: L) -> None:
        if self.burst is not None and self.burst.library is library:
            self.burst = None

    def free_libraries_hottest_first(self) -> Iterator[L]:
        return reversed(self.free.values())

    def free_libraries_by_speed(self) -> list[Iterator[L]]:
        """Return the free libraries of each speed, fastest first; empty if all device kinds are equally fast."""
        return [reversed(free.values()) for free in self._ranked.values()]

    def libraries_with_backlog_room(self) -> Iterator[L]:
        """Yield libraries without a free slot in which calls may wait. The library with the fewest calls is first."""
        for level in self._order:
            yield from self._levels[level].values()

    def libraries_by_backlog(self) -> Iterator[L]:
        """Yield libraries in which calls wait. The library with the most waiting calls is first."""
        for level in reversed(self._order):
            if level > FULL:
                yield from self._levels[level].values()


# ---- paces
MIN_WEIGHT_OF_NEWEST = 0.2  # Minimum weight of the newest measurements in a mean
_SERIAL_SHARE = 0.05  # Share of the work that does not run in parallel (Amdahl's law)
_KEPT_SHARES = 64  # Number of newest ended calls per kind of call whose processed shares are kept
_MIN_ENDED_CALLS = 8  # The shares of a kind of call are used after this many of its calls have ended
_MAX_CALL_KINDS = 64
_CallKind = tuple[str, bool]  # Declared kind of a call, and True if the call does other work before its first item
_BOUND_DEVIATIONS = 2.0  # The upper bound is the mean plus this number of mean deviations
SHORTEST_MEASUREMENT_S = 0.001  # Shorter measurements count as this many seconds, because no call takes 0 s
DEFAULT_MEETING_S = 2.0  # Assumed seconds until the ranks of a gang have connected (§5.1: at most 2 s)


class Paces:
    """Seconds per unit of work, by gang size. `meet_s`: seconds until a gang's ranks have connected."""

    __slots__ = ("_ends", "largest_shares", "measured", "meet_s")

    def __init__(self) -> None:
        # Seconds per unit of work, mean deviation and number of measurements, by gang size
        self.measured: dict[int, tuple[float, float, int]] = {}
        # By kind of call: the share of its items that each recent call had processed when it ended
        self._ends: dict[_CallKind, list[float]] = {}
        # By kind of call: largest share in `_ends`, if enough calls have ended
        self.largest_shares: dict[_CallKind, float] = {}
        self.meet_s = DEFAULT_MEETING_S

    def use_advised_paces(self, seconds: Mapping[int, float], *, meet_s: float = DEFAULT_MEETING_S) -> None:
        """Use paces that the advisor expects. Later measurements gradually replace them."""
        self.measured.update(
            {size: (max(pace, SHORTEST_MEASUREMENT_S / 1000), 0.0, 1) for size, pace in seconds.items()}
        )
        self.meet_s = meet_s

    def add_measurement(self, size: int, *, work: float, seconds: float) -> None:
        if work <= 0 or seconds < 0:
            return
        pace = max(seconds, SHORTEST_MEASUREMENT_S) / work
        mean, deviation, count = self.measured.get(size, (pace, 0.0, 0))
        weight = max(MIN_WEIGHT_OF_NEWEST, 1 / (count + 1))
        deviation += weight * (abs(pace - mean) - deviation)
        mean += weight * (pace - mean)
        self.measured[size] = (mean, deviation, count + 1)

    def record_processed_share(self, features: Features | None, done: float) -> None:
        """Record which share of its items a call had processed when it ended."""
        if features is not None and features.items:
            kind = _call_kind(features)
            ends = self._ends.setdefault(kind, [])
            ends.append(min(1.0, done / features.items))
            del ends[:-_KEPT_SHARES]
            if len(ends) >= _MIN_ENDED_CALLS:
                self.largest_shares[kind] = max(ends)
            if len(self._ends) > _MAX_CALL_KINDS:
                oldest = next(iter(self._ends))
                del self._ends[oldest]
                self.largest_shares.pop(oldest, None)

    def max_share_left(self, features: Features | None, done: float = 0.0, *, uses_ended_calls: bool = True) -> float:
        """Return which share of its items a call may still have to process.

        `uses_ended_calls`: False to ignore that earlier calls ended before they had processed all items.
        """
        most = 1.0
        if uses_ended_calls and features is not None and (kind := _call_kind(features)) in self.largest_shares:
            most = max((part for part in self._ends[kind] if part >= done), default=1.0)
        return max(0.0, most - done)

    def max_seconds(self, size: int, work: float) -> float | None:
        """Return an upper bound on the seconds that `work` takes on `size` replicas; None without measurements."""
        if not self.measured:
            return None
        if size not in self.measured:
            nearest = min(self.measured, key=lambda known: (abs(math.log(known / size)), known))
            scale = _time_relative_to_one_replica(size) / _time_relative_to_one_replica(nearest)
        else:
            nearest, scale = size, 1.0
        mean, deviation, _ = self.measured[nearest]
        return work * scale * (mean + _BOUND_DEVIATIONS * deviation) + (self.meet_s if size > 1 else 0.0)


def _call_kind(features: Features) -> _CallKind:
    return features.kind, features.fixed_s + features.shared_s > 0


def amount_of_work(features: Features | None) -> float:
    """Return the amount of work of a call in tokens, or in items if the length of the items is unknown."""
    return float(features.items * max(1, features.input_length)) if features is not None else 1.0


def _time_relative_to_one_replica(size: int) -> float:
    return _SERIAL_SHARE + (1 - _SERIAL_SHARE) / size


# ---- run times and speeds
_CALLS_PER_ROUND = 2  # Minimum number of equal calls of each device kind in a round
_MIN_ROUNDS = 5  # Minimum number of rounds before a speed ratio is used
_KEPT_ROUNDS = 31
_MAX_COUNTED_CALLS = 64  # If a kind has run more calls in a round, older calls get a smaller weight
_MAX_OPEN_ROUNDS = 64  # Maximum number of functions for which unfinished rounds are kept
_SHORTEST_RUN_S = 0.001  # Shorter calls are ignored, because their run time is mostly overhead
_MIN_RUNS_OF_KIND = 3  # The mean run time on a device kind is used after this number of runs

_Work = tuple[str, int]  # Function key and number of items per call


@dataclass(slots=True, eq=False, repr=False)
class KindRuns:
    """Runs on a device kind. `calls`, `seconds`, `items`: totals since the last record. `run_s`: recent mean."""

    calls: int = 0
    seconds: float = 0.0
    items: int = 0
    runs: int = 0
    run_s: float = 0.0

    def add_runs(self, calls: int, seconds: float, *, items: int = 0) -> None:
        self.calls += calls
        self.seconds += seconds
        self.items += items
        self.runs += calls
        weight = calls / self.runs
        self.run_s += (seconds / calls - self.run_s) * (
            weight if weight > MIN_WEIGHT_OF_NEWEST else MIN_WEIGHT_OF_NEWEST
        )


@dataclass(slots=True, eq=False, repr=False)
class FunctionCost:
    function: FunctionBlob
    recipe: RecipeKey
    runs: int = 0
    run_s: float = 0.0
    ordered_s: float = 0.0  # Expected run time of a call in seconds at the time when the queue was last sorted
    least_s: float = math.inf  # Shortest mean run time in seconds of calls that ended together
    by_kind: dict[str, KindRuns] = field(default_factory=dict)


class RunTimes(Protocol):
    @property
    def run_s(self) -> float:
        """Mean seconds of recent runs on any device kind; 0 = unknown."""

    @property
    def by_kind(self) -> Mapping[str, KindRuns]:
        """Statistics of the runs, by device kind."""


class Speeds:
    """Measured speeds of device kinds. `of`: speed by kind, relative to the fastest kind; empty if all kinds are
    equally fast.
    """

    __slots__ = ("_advised", "_logs", "_open", "_present", "_unrecorded", "of")

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        self._advised: dict[DeviceKindPair, tuple[float, float]] = {}
        self._logs: dict[DeviceKindPair, deque[float]] = {}  # Logarithms of the run time ratios of the latest rounds
        # By work and device kind: number and seconds of calls in unfinished rounds
        self._open: dict[_Work, dict[str, list[float]]] = {}
        self._present: frozenset[str] = frozenset()
        self._unrecorded: dict[DeviceKindPair, None] = {}

    def speed_of_kind(self, kind: str) -> float:
        return self.of.get(kind, 1.0)

    def is_measured(self, kind: str) -> bool:
        return any(kind in pair and len(logs) >= _MIN_ROUNDS for pair, logs in self._logs.items())

    def use_advised_speeds(self, speeds: Mapping[str, float]) -> None:
        """Use the speeds of earlier sessions until new measurements replace them."""
        known = {kind: speed for kind, speed in speeds.items() if speed > 0}
        if not known:
            return
        fastest = max(known, key=lambda kind: (known[kind], kind))
        self._advised = {
            (kind, fastest): (known[fastest] / speed, 1.0) for kind, speed in known.items() if kind != fastest
        }
        self._update_relative_speeds()

    def add_runs(self, work: _Work, kind: str, *, calls: int, seconds: float, present: Collection[str]) -> bool:
        """Add measured calls. Return True if a speed has changed. `present`: device kinds of the ready libraries."""
        if seconds < calls * _SHORTEST_RUN_S:
            return False
        if self._present != present:
            self._present = frozenset(present)
            self._open.clear()  # the ready libraries have other device kinds now, so earlier calls cannot be compared
        kinds = self._open.get(work)
        if kinds is None:
            kinds = self._open[work] = {}
            if len(self._open) > _MAX_OPEN_ROUNDS:
                del self._open[next(iter(self._open))]
        mine = kinds.setdefault(kind, [0.0, 0.0])
        mine[0] += calls
        mine[1] += seconds
        if mine[0] > _MAX_COUNTED_CALLS:
            mine[:] = _MAX_COUNTED_CALLS / 2, mine[1] * _MAX_COUNTED_CALLS / 2 / mine[0]
        others = [other for other in kinds if other != kind and kinds[other][0] >= _CALLS_PER_ROUND]
        if not others or mine[0] < _CALLS_PER_ROUND:
            return False
        mean_s = mine[1] / mine[0]
        for other in others:
            count, total_s = kinds.pop(other)
            first, second = sorted((kind, other))
            log = math.log(mean_s * count / total_s)
            self._logs.setdefault((first, second), deque(maxlen=_KEPT_ROUNDS)).append(log if first == kind else -log)
            self._unrecorded[first, second] = None
        del kinds[kind]
        before = self.of
        self._update_relative_speeds()
        return self.of != before

    def take_unrecorded_speed_ratios(self) -> list[tuple[DeviceKindPair, float]]:
        changed, self._unrecorded = self._unrecorded, {}
        ratios = ((pair, self._logs[pair]) for pair in changed)
        return [(pair, math.exp(_median(logs))) for pair, logs in ratios if len(logs) >= _MIN_ROUNDS]

    def _update_relative_speeds(self) -> None:
        ratios = dict(self._advised)
        for pair, logs in self._logs.items():
            if len(logs) >= _MIN_ROUNDS:
                ratios.pop(pair[::-1], None)
                ratios[pair] = math.exp(_median_if_significant(logs)), float(len(logs))
        self.of = compute_relative_speeds(ratios)


def _median(logs: Collection[float]) -> float:
    ordered = sorted(logs)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _median_if_significant(logs: Collection[float]) -> float:
    """Return the median of logarithms, or 0 if its 95 % confidence interval includes 0."""
    ordered, count = sorted(logs), len(logs)
    place = int((count - 2 * math.sqrt(count)) / 2)
    low, high = ordered[place], ordered[-1 - place]
    return 0.0 if low <= 0.0 <= high else _median(ordered)


def expected_seconds_on_kind(speeds: Speeds, runs: RunTimes, kind: str) -> float:
    """Return the expected seconds of a run on a device kind. If its speed is unknown, return the mean of all kinds."""
    if not speeds.of:
        return runs.run_s
    here = runs.by_kind.get(kind)
    if here is not None and here.runs >= _MIN_RUNS_OF_KIND:
        return here.run_s
    measured = [other for other, found in runs.by_kind.items() if found.runs and other in speeds.of]
    if kind not in speeds.of or not measured:
        return runs.run_s
    most = max(measured, key=lambda other: (runs.by_kind[other].runs, other))
    return runs.by_kind[most].run_s * speeds.of[most] / speeds.of[kind]
