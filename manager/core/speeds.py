"""Measure the speeds of device kinds for a context, and predict run times from them.

Only calls of one function with equally many items are compared. A *round* ends when two kinds have each run
`_ROUND_CALLS` of these calls; a round yields the ratio of their mean times. The ratio of two kinds is the median over
the latest rounds of all functions, so that one disturbed round changes little. Two kinds count as equally fast until a
95 % confidence interval of the median excludes 1, after at least `_LEAST_ROUNDS` rounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from stoker.contexts.speeds import Pair, relative_speeds

NEW_WEIGHT = 0.2  # Minimum weight of the latest runs in a mean run time
_ROUND_CALLS = 2  # Minimum calls of each device kind in a round
_LEAST_ROUNDS = 5  # Minimum number of rounds before a speed ratio is used
_KEPT_ROUNDS = 31
_RECENT_CALLS = 64  # After this many calls of a device kind in a round, older calls lose weight
_MOST_OPEN_ROUNDS = 64  # Maximum number of functions with an unfinished round
_SHORTEST_RUN_S = 0.001  # Shorter calls are ignored, because their run time is mostly overhead
_KNOWN_RUNS = 3  # Runs on a device kind after which their mean run time is used

_Work = tuple[str, int]  # Function key and number of items per call


@dataclass(slots=True, eq=False, repr=False)
class KindRuns:
    """Statistics of runs on one device kind: `calls`, `seconds` and `items` that are not recorded yet, and the mean run
    time of recent runs."""

    calls: int = 0
    seconds: float = 0.0
    items: int = 0
    runs: int = 0
    run_s: float = 0.0

    def count(self, calls: int, seconds: float, *, items: int = 0) -> None:
        self.calls += calls
        self.seconds += seconds
        self.items += items
        self.runs += calls
        weight = calls / self.runs
        self.run_s += (seconds / calls - self.run_s) * (weight if weight > NEW_WEIGHT else NEW_WEIGHT)

    def recorded(self) -> None:
        self.calls, self.seconds, self.items = 0, 0.0, 0


class Runs(Protocol):
    @property
    def run_s(self) -> float:
        """Mean seconds of recent runs on any device kind; 0 = unknown."""

    @property
    def by_kind(self) -> Mapping[str, KindRuns]:
        """Statistics of the runs, by device kind."""


class Speeds:
    """Speeds of device kinds for one context. `of`: each kind's speed relative to the fastest kind; empty if all kinds
    are equally fast."""

    __slots__ = ("_advised", "_logs", "_open", "_present", "_unrecorded", "of")

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        self._advised: dict[Pair, tuple[float, float]] = {}
        self._logs: dict[Pair, deque[float]] = {}  # Logarithms of the run time ratios of the latest rounds
        self._open: dict[_Work, dict[str, list[float]]] = {}  # By device kind: calls and seconds of unfinished rounds
        self._present: frozenset[str] = frozenset()
        self._unrecorded: dict[Pair, None] = {}

    def get(self, kind: str) -> float:
        return self.of.get(kind, 1.0)

    def is_measured(self, kind: str) -> bool:
        return any(kind in pair and len(logs) >= _LEAST_ROUNDS for pair, logs in self._logs.items())

    def advise(self, speeds: Mapping[str, float]) -> None:
        """Set the speeds that earlier sessions measured. These speeds are used until measured rounds replace them."""
        known = {kind: speed for kind, speed in speeds.items() if speed > 0}
        if not known:
            return
        fastest = max(known, key=lambda kind: (known[kind], kind))
        self._advised = {
            (kind, fastest): (known[fastest] / speed, 1.0) for kind, speed in known.items() if kind != fastest
        }
        self._update_relative_speeds()

    def learn(self, work: _Work, kind: str, *, calls: int, seconds: float, present: Collection[str]) -> bool:
        """Add measured calls of one function with one number of items. Return True if a speed changed. `present`:
        device kinds of the ready libraries.
        """
        if seconds < calls * _SHORTEST_RUN_S:
            return False
        if self._present != present:
            self._present = frozenset(present)
            self._open.clear()  # earlier calls of a kind that left, or ran alone, cannot be compared with later calls
        kinds = self._open.get(work)
        if kinds is None:
            kinds = self._open[work] = {}
            if len(self._open) > _MOST_OPEN_ROUNDS:
                del self._open[next(iter(self._open))]
        mine = kinds.setdefault(kind, [0.0, 0.0])
        mine[0] += calls
        mine[1] += seconds
        if mine[0] > _RECENT_CALLS:
            mine[:] = _RECENT_CALLS / 2, mine[1] * _RECENT_CALLS / 2 / mine[0]
        others = [other for other in kinds if other != kind and kinds[other][0] >= _ROUND_CALLS]
        if not others or mine[0] < _ROUND_CALLS:
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

    def take_unrecorded_ratios(self) -> list[tuple[Pair, float]]:
        changed, self._unrecorded = self._unrecorded, {}
        ratios = ((pair, self._logs[pair]) for pair in changed)
        return [(pair, math.exp(_median(logs))) for pair, logs in ratios if len(logs) >= _LEAST_ROUNDS]

    def _update_relative_speeds(self) -> None:
        ratios = dict(self._advised)
        for pair, logs in self._logs.items():
            if len(logs) >= _LEAST_ROUNDS:
                ratios.pop(pair[::-1], None)
                ratios[pair] = math.exp(_median_if_significant(logs)), float(len(logs))
        self.of = relative_speeds(ratios)


def _median(logs: Collection[float]) -> float:
    ordered = sorted(logs)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _median_if_significant(logs: Collection[float]) -> float:
    """Return the median, or 0 if its distribution-free confidence interval includes 0."""
    ordered, count = sorted(logs), len(logs)
    place = int((count - 2 * math.sqrt(count)) / 2)
    low, high = ordered[place], ordered[-1 - place]
    return 0.0 if low <= 0.0 <= high else _median(ordered)


def run_s_on(speeds: Speeds, runs: Runs, kind: str) -> float:
    """Return the expected seconds of a run on a device kind. Without known speeds, return the overall mean."""
    if not speeds.of:
        return runs.run_s
    here = runs.by_kind.get(kind)
    if here is not None and here.runs >= _KNOWN_RUNS:
        return here.run_s
    measured = [other for other, found in runs.by_kind.items() if found.runs and other in speeds.of]
    if kind not in speeds.of or not measured:
        return runs.run_s
    most = max(measured, key=lambda other: (runs.by_kind[other].runs, other))
    return runs.by_kind[most].run_s * speeds.of[most] / speeds.of[kind]
