"""Compute the number of devices per runtime: Arlo's equations 1 to 7 (§3.3), solved exactly.

A *runtime* is the model compiled for one length. In one period runtime `i` receives `requests` (Q_i), and one instance
answers at most `capacity` (M_i) in time. The other requests are demoted to the next longer runtime (eqs 4, 5). The sum
of latencies (eq. 1) is minimal over all assignments of exactly `devices` devices (eq. 2). Each runtime gets at least
the instances that its own requests fill (eq. 3), and the longest at least 1 (eq. 7).

The search adds one runtime at a time, from short to long. It drops partial assignments that are dominated, or whose
lower bound is too high. The bound uses the cheapest demotion and the convex hull of the costs.

A context is a runtime of a family if calls list it with other contexts (`Context.variants`), or if it declares its
longest input. Its mean run time is its profile (§3.1). The run time of an unmeasured runtime is scaled by length from
the measured runtime with the nearest length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import floor, inf

import msgspec

from stoker.errors import StokerError
from stoker.manager.core.nouns import Call, Context

_TOLERANCE = 1e-9  # Relative tolerance for cost comparisons
_BEAM_WIDTH = 32  # Partial allocations that the first, approximate search keeps per runtime


class NotEnoughDevicesError(StokerError):
    """Equation 3 requires more devices (`needed`) than are available."""

    def __init__(self, needed: int, devices: int) -> None:
        super().__init__(f"the requests need {needed} devices, but there are only {devices}")
        self.needed = needed


class LatencyTable(msgspec.Struct, frozen=True):
    """Mean latency in a period by number of requests: increasing points (requests, seconds), linear in between."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.points))
        if not self.points or not rising:
            raise ValueError(f"a latency table needs at least one point, and its points must rise: {self.points}")

    @classmethod
    def with_batch_size_one(cls, request_s: float, *, capacity: int) -> LatencyTable:
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
    def least_instances(self) -> int:
        return floor(self.requests / self.capacity)


class Allocation(msgspec.Struct, frozen=True):
    """Number of instances of each runtime, shortest first, and the sum of latencies in seconds."""

    instances: tuple[int, ...]
    latency_s: float


def allocate(devices: int, runtimes: Sequence[RuntimeDemand]) -> Allocation:
    """Return the best allocation. Raises NotEnoughDevicesError if equations 3 and 7 cannot hold."""
    least = [runtime.least_instances for runtime in runtimes]
    least[-1] = max(1, least[-1])
    if sum(least) > devices:
        raise NotEnoughDevicesError(sum(least), devices)
    return _AllocationSearch(devices, runtimes, least).find_best()


def _cost_and_demoted(runtime: RuntimeDemand, count: int, demoted: float, *, is_last: bool) -> tuple[float, float]:
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

    def find_best(self) -> Allocation:
        found = self._search(self._greedy_allocation(), width=_BEAM_WIDTH)
        best = self._search(found, width=None)
        return Allocation(self._read_instances(best), best.cost)

    def _search(self, found: _Node, *, width: int | None) -> _Node:
        """Return the best allocation, which may be `found`. `width`: search nodes kept per runtime (None = all)."""
        most = found.cost * (1 - _TOLERANCE)
        front = [_Node(0, 0.0, 0.0, 0, None)]
        for number in range(len(self._runtimes)):
            after = (node for before in front for node in self._iter_next_nodes(before, number, most=most))
            front = _drop_dominated(node for node in after if self._lower_bound(node, number) <= most)
            if width is not None and len(front) > width:
                bounds = sorted((self._lower_bound(node, number), at) for at, node in enumerate(front))
                front = [front[at] for _, at in bounds[:width]]
        ends = [node for node in front if node.used == self._spare]
        return min([found, *ends], key=lambda node: node.cost)

    def _greedy_allocation(self) -> _Node:
        node = _Node(0, 0.0, 0.0, 0, None)
        for number in range(len(self._runtimes)):
            node = min(self._iter_next_nodes(node, number, most=inf), key=lambda each: self._lower_bound(each, number))
        return node

    def _lower_bound(self, node: _Node, number: int) -> float:
        return node.cost + self._lower_bounds[number + 1][self._spare - node.used]

    def _iter_next_nodes(self, before: _Node, number: int, *, most: float) -> Iterator[_Node]:
        runtime, least, free = self._runtimes[number], self._least[number], self._spare - before.used
        is_last = number == len(self._runtimes) - 1

        def make_node(extra: int) -> _Node:
            cost, demoted = _cost_and_demoted(runtime, least + extra, before.demoted, is_last=is_last)
            return _Node(before.used + extra, demoted, before.cost + cost, extra, before)

        if is_last:
            yield make_node(free)
            return
        # From `enough` instances on, no request is demoted, and the lower bound is convex: it falls, then rises.
        enough = min(free + 1, max(0, -floor(-(before.demoted + runtime.requests) / runtime.capacity) - least))
        yield from map(make_node, range(enough))
        if enough > free or not runtime.latency.is_convex:
            yield from map(make_node, range(enough, free + 1))
            return

        def rises_after(extra: int) -> bool:
            return self._lower_bound(make_node(extra), number) <= self._lower_bound(make_node(extra + 1), number)

        best = enough + bisect_left(range(enough, free), True, key=rises_after)
        yield make_node(best)
        for way in (range(best - 1, enough - 1, -1), range(best + 1, free + 1)):
            for extra in way if most < inf else ():
                one = make_node(extra)
                if self._lower_bound(one, number) > most:
                    break
                yield one

    def _read_instances(self, node: _Node) -> tuple[int, ...]:
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


def _lower_bounds(runtimes: Sequence[RuntimeDemand], least: Sequence[int], spare: int) -> list[list[float]]:
    """Return, by runtime and spare devices, a lower bound on the cost of that runtime and all longer runtimes."""
    savings: list[float] = []
    base, fastest, found = 0.0, 0.0, []
    for number in range(len(runtimes) - 1, -1, -1):
        runtime, is_last = runtimes[number], number == len(runtimes) - 1
        steps = (_cost_and_demoted(runtime, least[number] + extra, 0.0, is_last=is_last) for extra in range(spare + 1))
        start, slopes = _lower_convex_hull([cost + demoted * fastest for cost, demoted in steps])
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


# ---- the runtimes of a family

ASSUMED_CAPACITY = 8  # Calls that an unmeasured longest runtime is assumed to answer within one latency objective
_BUCKETS_PER_PERIOD = 12


def is_runtime_variant(context: Context) -> bool:
    return bool(context.variants or context.variant_of or context.recipe.longest_input)


def family_runtimes_shortest_first(context: Context) -> tuple[Context, ...]:
    others = dict(context.variants)
    for shorter in context.variant_of.values():
        others[shorter.recipe.key] = shorter
        others.update(shorter.variants)
    others[context.recipe.key] = context
    # If lengths are not declared, the runtime with the most variants counts as the shortest.
    return tuple(sorted(others.values(), key=lambda x: (x.recipe.longest_input, -len(x.variants), x.recipe.key)))


def uniform_length_call_shares(family: Sequence[Context]) -> list[float]:
    lengths = [context.recipe.longest_input for context in family]
    if not all(lengths):
        return [1 / len(family)] * len(family)
    return [(longer - shorter) / lengths[-1] for shorter, longer in pairwise((0, *lengths))]


class RuntimeTimes:
    """Measured or estimated run times of each runtime. `latency_s`: default latency objective of calls."""

    def __init__(self, *, latency_s: float) -> None:
        self._default_objective_s = latency_s
        self._objectives_s: dict[str, float] = {}  # By recipe key: latency objective of the family's last call

    def remember_objective(self, call: Call) -> None:
        context, wanted_s = call.group.context, call.group.options.objective.latency_s
        if wanted_s and self._objectives_s.get(context.recipe.key) != wanted_s:
            self._objectives_s.update({each.recipe.key: wanted_s for each in family_runtimes_shortest_first(context)})

    def objective_s(self, context: Context) -> float:
        return self._objectives_s.get(context.recipe.key, self._default_objective_s)

    def request_s(self, context: Context) -> float:
        if context.run_s > 0:
            return context.run_s / context.slots
        family = family_runtimes_shortest_first(context)
        measured = [each for each in family if each.run_s > 0]
        if not measured:
            return _scale_by_length(self.objective_s(context) / ASSUMED_CAPACITY, context, family[-1])
        nearest = min(measured, key=lambda each: abs(each.recipe.longest_input - context.recipe.longest_input))
        return _scale_by_length(nearest.run_s / nearest.slots, context, nearest)

    def capacity(self, context: Context) -> int:
        """Return how many calls an instance answers within the latency objective (M_i)."""
        return max(context.slots, int(self.objective_s(context) / self.request_s(context)))

    def make_demand(self, context: Context, calls_per_s: float) -> RuntimeDemand:
        """Return the demand in one latency objective. Each call beyond the capacity adds one objective to the mean."""
        capacity, objective_s = self.capacity(context), self.objective_s(context)
        points = LatencyTable.with_batch_size_one(self.request_s(context), capacity=capacity).points
        most, mean_s = points[-1]
        latency = LatencyTable((*points, (most + 1, mean_s + objective_s)))
        return RuntimeDemand(calls_per_s * objective_s, capacity, latency)


class ArrivalCounts:
    """Counts the calls of the last `over_s` seconds by the shortest runtime that fits them."""

    def __init__(self, *, over_s: float) -> None:
        self.over_s = over_s
        self._buckets: deque[tuple[float, dict[str, int]]] = deque()
        """Start time of each bucket (a part of the last `over_s` seconds), and its number of calls by recipe key."""
        self._arrived_at: dict[str, tuple[float, float]] = {}  # Times of the first and the last call of each context

    def record_arrival(self, context: Context, now: float) -> None:
        pieces, key = self._buckets, context.recipe.key
        if not pieces or now - pieces[-1][0] >= self.over_s / _BUCKETS_PER_PERIOD:
            pieces.append((now, {}))
            while pieces[0][0] < now - self.over_s:
                pieces.popleft()
        counts = pieces[-1][1]
        counts[key] = counts.get(key, 0) + 1
        self._arrived_at[key] = self._arrived_at.get(key, (now, now))[0], now

    def count_recent(self, context: Context, now: float) -> int:
        key = context.recipe.key
        return sum(counts.get(key, 0) for at, counts in self._buckets if at >= now - self.over_s)

    def observed_s(self, family: Sequence[Context], now: float) -> float:
        known = [self._arrived_at[each.recipe.key][0] for each in family if each.recipe.key in self._arrived_at]
        return min(self.over_s, now - min(known, default=now))

    def has_arrivals_since(self, family: Sequence[Context], since: float) -> bool:
        return any(self._arrived_at.get(context.recipe.key, (0.0, -2.0))[1] > since for context in family)


def _scale_by_length(seconds: float, context: Context, known: Context) -> float:
    mine, its = context.recipe.longest_input, known.recipe.longest_input
    return seconds * mine / its if mine and its else seconds
