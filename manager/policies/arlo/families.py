"""What the policy knows of a family: its runtimes in their order, how long each takes, and how many calls come for it.

A runtime is a context that calls list beside others (`Context.lists`), or that says the longest input that it takes.
Times are measured: a static runtime takes as long for every input, so the mean of a context's runs is its profile
(§3.1). Until a runtime has run, it is taken to be as fast as the nearest one that has, in relation to their lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stoker.manager.core.nouns import Call, Context
from stoker.manager.policies.arlo.allocation import LatencyTable, RuntimeDemand

UNMEASURED = 8
"""How many calls the longest runtime is taken to answer within the objective before any runtime has run."""
_PIECES = 12


def is_runtime(context: Context) -> bool:
    """Whether a context is one of a family."""
    return bool(context.lists or context.listed_by or context.recipe.longest_input)


def runtimes_of(context: Context) -> tuple[Context, ...]:
    """The runtimes of a context's family that calls have named so far, the shortest first: those that its own calls
    list, those whose calls list it, and what these list as well."""
    others = dict(context.lists)
    for shorter in context.listed_by.values():
        others[shorter.recipe.key] = shorter
        others.update(shorter.lists)
    others[context.recipe.key] = context
    return tuple(sorted(others.values(), key=_length))


def _length(context: Context) -> tuple[int, int, str]:
    """Where a runtime stands in its family: those that do not say their length are the shorter the more they list."""
    return context.recipe.longest_input, -len(context.lists), context.recipe.key


class RuntimeTimes:
    """How fast the runtimes are, against what calls want. `latency_s`: for calls that do not say how long they may
    take."""

    def __init__(self, *, latency_s: float) -> None:
        self._usual_s = latency_s
        self._wanted_s: dict[str, float] = {}
        """The latency that the last call of a family wanted, by the keys of its runtimes."""

    def note(self, call: Call) -> None:
        """A call has come: what it wants holds for its family."""
        context, wanted_s = call.group.context, call.group.options.objective.latency_s
        if wanted_s and self._wanted_s.get(context.recipe.key) != wanted_s:
            self._wanted_s.update({each.recipe.key: wanted_s for each in runtimes_of(context)})

    def objective_s(self, context: Context) -> float:
        """How long a call of a context's family may take."""
        return self._wanted_s.get(context.recipe.key, self._usual_s)

    def request_s(self, context: Context) -> float:
        """Seconds of an instance for one call; where calls run at once, each of its slots takes its share of them."""
        if context.run_s > 0:
            return context.run_s / context.slots
        family = runtimes_of(context)
        measured = [each for each in family if each.run_s > 0]
        if not measured:
            return _in_proportion(self.objective_s(context) / UNMEASURED, context, family[-1])
        nearest = min(measured, key=lambda each: abs(each.recipe.longest_input - context.recipe.longest_input))
        return _in_proportion(nearest.run_s / nearest.slots, context, nearest)

    def capacity(self, context: Context) -> int:
        """How many calls an instance answers within the objective (M_i), at least as many as it runs at once."""
        return max(context.slots, int(self.objective_s(context) / self.request_s(context)))

    def demand(self, context: Context, calls_per_s: float) -> RuntimeDemand:
        """The runtime as the allocation sees it: its calls during one objective, and what an instance does in that.

        No instance is to be given more than its capacity (§3.3), which equations 3 and 5 do not keep from the longest
        runtime: a call above it costs a whole objective more.
        """
        capacity, objective_s = self.capacity(context), self.objective_s(context)
        points = LatencyTable.one_by_one(self.request_s(context), capacity=capacity).points
        most, mean_s = points[-1]
        latency = LatencyTable((*points, (most + 1, mean_s + objective_s)))
        return RuntimeDemand(calls_per_s * objective_s, capacity, latency)


class ArrivalCounts:
    """How many calls have come lately whose ideal runtime is each context: those of the last `over_s`, to a twelfth of
    that. Written by dispatch, read by residency."""

    def __init__(self, *, over_s: float) -> None:
        self.over_s = over_s
        self._pieces: deque[tuple[float, dict[str, int]]] = deque()
        """When each piece of the time began, and the calls that came in it, by recipe key."""
        self._came_at: dict[str, tuple[float, float]] = {}
        """When the first and the last call of each context came."""

    def came(self, context: Context, now: float) -> None:
        """A call has come whose ideal runtime this is."""
        pieces, key = self._pieces, context.recipe.key
        if not pieces or now - pieces[-1][0] >= self.over_s / _PIECES:
            pieces.append((now, {}))
            while pieces[0][0] < now - self.over_s:
                pieces.popleft()
        counts = pieces[-1][1]
        counts[key] = counts.get(key, 0) + 1
        self._came_at[key] = self._came_at.get(key, (now, now))[0], now

    def of(self, context: Context, now: float) -> int:
        """Calls of a runtime that came lately."""
        key = context.recipe.key
        return sum(counts.get(key, 0) for at, counts in self._pieces if at >= now - self.over_s)

    def seconds(self, family: Sequence[Context], now: float) -> float:
        """For how long the calls of a family have been counted, at most."""
        known = [self._came_at[each.recipe.key][0] for each in family if each.recipe.key in self._came_at]
        return min(self.over_s, now - min(known, default=now))

    def came_since(self, family: Sequence[Context], since: float) -> bool:
        """Whether a call of a family has come after a moment."""
        return any(self._came_at.get(context.recipe.key, (0.0, -2.0))[1] > since for context in family)


def _in_proportion(seconds: float, context: Context, known: Context) -> float:
    mine, its = context.recipe.longest_input, known.recipe.longest_input
    return seconds * mine / its if mine and its else seconds
