"""Compute the number of devices per runtime: Arlo's equations 1 to 7 (§3.3), solved exactly.

A *runtime* is the model compiled for one length. In one period runtime `i` receives `requests` (Q_i), and one instance
answers at most `capacity` (M_i) in time. The others are demoted to the next longer runtime (eqs 4, 5). The sum of
latencies (eq. 1) is minimal over all assignments of exactly `devices` devices (eq. 2). Each runtime gets at least the
instances that its own requests fill (eq. 3), and the longest at least 1 (eq. 7).

The search adds one runtime at a time, from short to long, and drops partial assignments that are dominated, or whose
lower bound is too high. The bound uses the cheapest demotion and the convex hull of the costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import floor, inf

import msgspec

from stoker.errors import StokerError

_TOLERANCE = 1e-9  # Relative tolerance for cost comparisons
_BEAM_WIDTH = 32  # Partial allocations kept per runtime in the first search


class NotEnoughDevicesError(StokerError):
    """Equation 3 requires more devices (`needed`) than are available."""

    def __init__(self, needed: int, devices: int) -> None:
        super().__init__(f"the requests fill {needed} devices, and there are {devices}")
        self.needed = needed


class LatencyTable(msgspec.Struct, frozen=True):
    """Mean latency in a period by number of requests: increasing points (requests, seconds), linear in between."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.points))
        if not self.points or not rising:
            raise ValueError(f"a latency table needs at least one point, and rising points: {self.points}")

    @classmethod
    def one_by_one(cls, request_s: float, *, capacity: int) -> LatencyTable:
        """Return the table of an instance with batch size 1 (§5)."""
        points = {1.0: request_s, float(max(2, capacity)): request_s * (max(2, capacity) + 1) / 2}
        return cls(tuple(points.items()))

    def mean_s(self, requests: float) -> float:
        points = self.points
        if requests <= points[0][0] or len(points) == 1:
            return points[0][1]
        at = min(bisect_right(points, (requests, inf)), len(points) - 1)
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        return y0 + (requests - x0) * (y1 - y0) / (x1 - x0)

    @property
    def is_convex(self) -> bool:
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(self.points)]
        return all(a <= b * (1 + _TOLERANCE) for a, b in pairwise(slopes))


class RuntimeDemand(msgspec.Struct, frozen=True):
    """Demand for one runtime in a period: `requests` (Q_i), `capacity` of an instance (M_i), latency table (L_i)."""

    requests: float
    capacity: int
    latency: LatencyTable

    @property
    def least(self) -> int:
        return floor(self.requests / self.capacity)


class Allocation(msgspec.Struct, frozen=True):
    """Number of instances of each runtime, shortest first, and the sum of latencies in seconds."""

    instances: tuple[int, ...]
    latency_s: float


def allocate(devices: int, runtimes: Sequence[RuntimeDemand]) -> Allocation:
    """Return the best allocation. Raises NotEnoughDevicesError if equations 3 and 7 cannot hold."""
    least = [runtime.least for runtime in runtimes]
    least[-1] = max(1, least[-1])
    if sum(least) > devices:
        raise NotEnoughDevicesError(sum(least), devices)
    return _AllocationSearch(devices, runtimes, least).best()


def allocation_cost_s(instances: Sequence[int], runtimes: Sequence[RuntimeDemand]) -> float:
    """Return the cost of an allocation in seconds (eq. 1); infinity if the longest runtime lacks a needed instance."""
    left, total = 0.0, 0.0
    for number, (count, runtime) in enumerate(zip(instances, runtimes, strict=True)):
        cost, left = _step(runtime, count, left, is_last=number == len(runtimes) - 1)
        total += cost
    return total


def _step(runtime: RuntimeDemand, count: int, demoted: float, *, is_last: bool) -> tuple[float, float]:
    wanted, most = demoted + runtime.requests, count * runtime.capacity
    served = wanted if is_last else min(wanted, most)
    if not served:
        return 0.0, wanted
    if not count:
        return inf, 0.0
    return runtime.latency.mean_s(served / count) * served, max(wanted - served, 0.0)


class _Node(msgspec.Struct, frozen=True, gc=False):
    used: int
    demoted: float
    cost: float
    count: int
    before: _Node | None


class _AllocationSearch:
    def __init__(self, devices: int, runtimes: Sequence[RuntimeDemand], least: Sequence[int]) -> None:
        self._runtimes = runtimes
        self._least = least
        self._spare = devices - sum(least)
        self._lower_bounds = [*_lower_bounds(runtimes, least, self._spare), [0.0] * (self._spare + 1)]

    def best(self) -> Allocation:
        found = self._search(self._greedy_allocation(), width=_BEAM_WIDTH)
        best = self._search(found, width=None)
        return Allocation(self._instances(best), best.cost)

    def _search(self, found: _Node, *, width: int | None) -> _Node:
        """Return the best allocation, which may be `found`. `width`: search nodes kept per runtime (None = all)."""
        most = found.cost * (1 - _TOLERANCE)
        front = [_Node(0, 0.0, 0.0, 0, None)]
        for number in range(len(self._runtimes)):
            after = (node for before in front for node in self._counts(before, number, most=most))
            front = _drop_dominated(node for node in after if self._bound(node, number) <= most)
            if width is not None and len(front) > width:
                bounds = sorted((self._bound(node, number), at) for at, node in enumerate(front))
                front = [front[at] for _, at in bounds[:width]]
        ends = [node for node in front if node.used == self._spare]
        return min([found, *ends], key=lambda node: node.cost)

    def _greedy_allocation(self) -> _Node:
        node = _Node(0, 0.0, 0.0, 0, None)
        for number in range(len(self._runtimes)):
            node = min(self._counts(node, number, most=inf), key=lambda each: self._bound(each, number))
        return node

    def _bound(self, node: _Node, number: int) -> float:
        return node.cost + self._lower_bounds[number + 1][self._spare - node.used]

    def _counts(self, before: _Node, number: int, *, most: float) -> Iterator[_Node]:
        runtime, least, free = self._runtimes[number], self._least[number], self._spare - before.used
        is_last = number == len(self._runtimes) - 1

        def node(extra: int) -> _Node:
            cost, demoted = _step(runtime, least + extra, before.demoted, is_last=is_last)
            return _Node(before.used + extra, demoted, before.cost + cost, extra, before)

        if is_last:
            yield node(free)
            return
        # From `enough` instances on, no request is demoted, and the lower bound is convex: it falls, then rises.
        enough = min(free + 1, max(0, -floor(-(before.demoted + runtime.requests) / runtime.capacity) - least))
        yield from map(node, range(enough))
        if enough > free or not runtime.latency.is_convex:
            yield from map(node, range(enough, free + 1))
            return
        best = _index_of_minimum(lambda extra: self._bound(node(extra), number), enough, free)
        yield node(best)
        for way in (range(best - 1, enough - 1, -1), range(best + 1, free + 1)):
            for extra in way if most < inf else ():
                one = node(extra)
                if self._bound(one, number) > most:
                    break
                yield one

    def _instances(self, node: _Node) -> tuple[int, ...]:
        counts: list[int] = []
        at: _Node = node
        while at.before is not None:
            counts.append(at.count)
            at = at.before
        return tuple(least + extra for least, extra in zip(self._least, reversed(counts), strict=True))


def _drop_dominated(nodes: Iterator[_Node]) -> list[_Node]:
    kept: list[_Node] = []
    for node in sorted(nodes, key=lambda node: (node.used, node.cost, node.demoted)):
        if not kept or kept[-1].used != node.used or node.demoted < kept[-1].demoted:
            kept.append(node)
    return kept


def _index_of_minimum(value: Callable[[int], float], first: int, last: int) -> int:
    while first < last:
        middle = (first + last) // 2
        if value(middle) <= value(middle + 1):
            last = middle
        else:
            first = middle + 1
    return first


def _lower_bounds(runtimes: Sequence[RuntimeDemand], least: Sequence[int], spare: int) -> list[list[float]]:
    """Return, by runtime and spare devices, a lower bound on the cost of that runtime and all longer ones."""
    savings: list[float] = []
    base, fastest, found = 0.0, 0.0, []
    for number in range(len(runtimes) - 1, -1, -1):
        runtime, is_last = runtimes[number], number == len(runtimes) - 1
        costs = []
        for extra in range(spare + 1):
            cost, demoted = _step(runtime, least[number] + extra, 0.0, is_last=is_last)
            costs.append(cost + demoted * fastest)
        start, slopes = _lower_convex_hull(costs)
        base += start
        savings = sorted([*savings, *slopes])[:spare]
        found.append(list(accumulate(savings, initial=base)))
        fastest = runtime.latency.points[0][1] if is_last else min(fastest, runtime.latency.points[0][1])
    return found[::-1]


def _lower_convex_hull(values: Sequence[float]) -> tuple[float, list[float]]:
    corners: list[int] = []
    for at, value in enumerate(values):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (values[b] - values[a]) * (at - a) < (value - values[a]) * (b - a):
                break
            corners.pop()
        corners.append(at)
    slopes: list[float] = []
    for a, b in pairwise(corners):
        slopes += [(values[b] - values[a]) / (b - a)] * (b - a)
    return values[0], slopes
