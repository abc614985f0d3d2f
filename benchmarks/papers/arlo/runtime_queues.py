"""Keep the instances of each runtime by load, for Algorithm 1 of the policy (`choose_head`), without I/O.

A session uses `LoadIndex` of the core. A heap per runtime costs less for instances without slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from stoker.manager.policies.arlo.dispatch import DECAY, PEEKED, THRESHOLD, choose_head, load_thresholds_by_level

Instance = TypeVar("Instance", bound=Hashable)

_STALE = 4
"""Heap entries per instance that trigger a cleanup of a level."""


class RuntimeTooShortError(ValueError):
    """A request is longer than every runtime with an instance."""

    def __init__(self, tokens: int, longest: int) -> None:
        super().__init__(f"a request of {tokens} tokens, and the longest runtime takes {longest}")
        self.tokens, self.longest = tokens, longest


class _RuntimeLevel(Generic[Instance]):
    """The instances of one runtime in a heap, least loaded first."""

    def __init__(self, length: int, capacity: int) -> None:
        self.length = length
        self.capacity = capacity
        self.loads: dict[Instance, int] = {}
        self._heap: list[tuple[int, int, Instance]] = []
        self._pushed = 0

    def set(self, instance: Instance, load: int) -> None:
        self.loads[instance] = load
        self._pushed += 1
        if len(self._heap) > _STALE * len(self.loads):
            self._heap = [(each, at, name) for at, (name, each) in enumerate(self.loads.items(), self._pushed)]
            self._pushed += len(self._heap)
            heapify(self._heap)
        else:
            heappush(self._heap, (load, self._pushed, instance))

    def head(self) -> tuple[int, Instance]:
        """Return the least load and its instance."""
        heap, loads = self._heap, self.loads
        while True:
            load, _, instance = heap[0]
            if loads.get(instance) == load:
                return load, instance
            heappop(heap)


class RuntimeQueues(Generic[Instance]):
    """Instances of every runtime by load. `runtimes`: increasing lengths in tokens, with capacities."""

    def __init__(
        self, runtimes: Sequence[tuple[int, int]], *, threshold: float = THRESHOLD, decay: float = DECAY,
        peeked: int = PEEKED,
    ) -> None:  # fmt: skip
        self._lengths = [length for length, _ in runtimes]
        if not runtimes or any(a >= b for a, b in zip(self._lengths, self._lengths[1:], strict=False)):
            raise ValueError(f"runtimes have rising lengths, at least one: {self._lengths}")
        self._levels: list[_RuntimeLevel[Instance]] = [_RuntimeLevel(length, capacity) for length, capacity in runtimes]
        self._level_of: dict[Instance, _RuntimeLevel[Instance]] = {}
        self._thresholds = load_thresholds_by_level(threshold=threshold, decay=decay, peeked=peeked)

    def add(self, instance: Instance, runtime: int) -> None:
        level = self._level_of[instance] = self._levels[runtime]
        level.set(instance, 0)

    def remove(self, instance: Instance) -> None:
        del self._level_of.pop(instance).loads[instance]

    def take(self, tokens: int) -> Instance:
        chosen, _ = choose_head(self._heads(tokens), self._thresholds)
        if chosen is None:
            longest = max((level.length for level in self._level_of.values()), default=0)
            raise RuntimeTooShortError(tokens, longest)
        level = self._level_of[chosen]
        level.set(chosen, level.loads[chosen] + 1)
        return chosen

    def done(self, instance: Instance) -> None:
        level = self._level_of[instance]
        level.set(instance, level.loads[instance] - 1)

    def load(self, instance: Instance) -> int:
        return self._level_of[instance].loads[instance]

    def _heads(self, tokens: int) -> Iterator[tuple[int, int, Instance]]:
        """Yield load, capacity and head of each runtime that is long enough and has instances."""
        levels = self._levels
        for at in range(bisect_left(self._lengths, tokens), len(levels)):
            level = levels[at]
            if level.loads:
                load, head = level.head()
                yield load, level.capacity, head
