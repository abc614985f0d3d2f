"""Track the runtimes of a family by length, their run times, and the arrivals of their calls.

A context is a runtime if calls list it with other contexts (`Context.lists`), or if it declares its longest input. The
mean run time of a runtime is its profile (§3.1). The run time of an unmeasured runtime is scaled by length from the
measured runtime with the nearest length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from stoker.manager.core.nouns import Call, Context
from stoker.manager.policies.arlo.allocation import LatencyTable, RuntimeDemand

UNMEASURED = 8  # Before any run: calls that the longest runtime is assumed to answer within the latency objective
_PIECES = 12


def is_runtime_variant(context: Context) -> bool:
    return bool(context.lists or context.listed_by or context.recipe.longest_input)


def family_runtimes_shortest_first(context: Context) -> tuple[Context, ...]:
    others = dict(context.lists)
    for shorter in context.listed_by.values():
        others[shorter.recipe.key] = shorter
        others.update(shorter.lists)
    others[context.recipe.key] = context
    # Without declared lengths, a runtime that lists more contexts counts as shorter.
    return tuple(sorted(others.values(), key=lambda x: (x.recipe.longest_input, -len(x.lists), x.recipe.key)))


def uniform_length_call_shares(family: Sequence[Context]) -> list[float]:
    lengths = [context.recipe.longest_input for context in family]
    if not all(lengths):
        return [1 / len(family)] * len(family)
    return [(longer - shorter) / lengths[-1] for shorter, longer in pairwise((0, *lengths))]


class RuntimeTimes:
    """Measured or estimated run times of each runtime. `latency_s`: default latency objective of calls."""

    def __init__(self, *, latency_s: float) -> None:
        self._usual_s = latency_s
        self._wanted_s: dict[str, float] = {}  # By recipe key: latency objective of the family's last call

    def note(self, call: Call) -> None:
        context, wanted_s = call.group.context, call.group.options.objective.latency_s
        if wanted_s and self._wanted_s.get(context.recipe.key) != wanted_s:
            self._wanted_s.update({each.recipe.key: wanted_s for each in family_runtimes_shortest_first(context)})

    def objective_s(self, context: Context) -> float:
        return self._wanted_s.get(context.recipe.key, self._usual_s)

    def request_s(self, context: Context) -> float:
        if context.run_s > 0:
            return context.run_s / context.slots
        family = family_runtimes_shortest_first(context)
        measured = [each for each in family if each.run_s > 0]
        if not measured:
            return _scale_by_length(self.objective_s(context) / UNMEASURED, context, family[-1])
        nearest = min(measured, key=lambda each: abs(each.recipe.longest_input - context.recipe.longest_input))
        return _scale_by_length(nearest.run_s / nearest.slots, context, nearest)

    def capacity(self, context: Context) -> int:
        """Return how many calls an instance answers within the latency objective (M_i)."""
        return max(context.slots, int(self.objective_s(context) / self.request_s(context)))

    def demand(self, context: Context, calls_per_s: float) -> RuntimeDemand:
        """Return the demand per latency objective. A call too many (eqs 3, 5) costs one more objective (§3.3)."""
        capacity, objective_s = self.capacity(context), self.objective_s(context)
        points = LatencyTable.one_by_one(self.request_s(context), capacity=capacity).points
        most, mean_s = points[-1]
        latency = LatencyTable((*points, (most + 1, mean_s + objective_s)))
        return RuntimeDemand(calls_per_s * objective_s, capacity, latency)


class ArrivalCounts:
    """Call counts of the last `over_s` seconds by shortest runtime."""

    def __init__(self, *, over_s: float) -> None:
        self.over_s = over_s
        self._pieces: deque[tuple[float, dict[str, int]]] = deque()
        """Start time of each bucket, and its number of calls by recipe key."""
        self._came_at: dict[str, tuple[float, float]] = {}  # Times of the first and the last call of each context

    def came(self, context: Context, now: float) -> None:
        pieces, key = self._pieces, context.recipe.key
        if not pieces or now - pieces[-1][0] >= self.over_s / _PIECES:
            pieces.append((now, {}))
            while pieces[0][0] < now - self.over_s:
                pieces.popleft()
        counts = pieces[-1][1]
        counts[key] = counts.get(key, 0) + 1
        self._came_at[key] = self._came_at.get(key, (now, now))[0], now

    def of(self, context: Context, now: float) -> int:
        key = context.recipe.key
        return sum(counts.get(key, 0) for at, counts in self._pieces if at >= now - self.over_s)

    def seconds(self, family: Sequence[Context], now: float) -> float:
        known = [self._came_at[each.recipe.key][0] for each in family if each.recipe.key in self._came_at]
        return min(self.over_s, now - min(known, default=now))

    def has_arrivals_since(self, family: Sequence[Context], since: float) -> bool:
        return any(self._came_at.get(context.recipe.key, (0.0, -2.0))[1] > since for context in family)


def _scale_by_length(seconds: float, context: Context, known: Context) -> float:
    mine, its = context.recipe.longest_input, known.recipe.longest_input
    return seconds * mine / its if mine and its else seconds
