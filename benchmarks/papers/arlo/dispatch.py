"""Choose instances: by Algorithm 1 (`runtime_queues`) and as in the other systems; simulate the example of Figure 4.

INFaaS uses the busiest instance that is long enough and has free capacity (§5). Variant 1 uses all runtimes, and
instances that can answer in time. Variant 2: the shortest runtime with an instance where at most one request waits.
Inter-groups Greedy (§5.2.3) uses the least loaded instance that is long enough. ST and DT balance load (§5): by the
least loaded instance, or at random.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from stoker.manager.policies.arlo.dispatch import DECAY, PEEKED, THRESHOLD, choose_head, load_thresholds_by_level

_STALE = 4
"""Heap entries per instance that trigger a cleanup of a level."""
_ROOM = 2
"""Requests at which an instance is full in variant 2."""


class HeapLevel:
    """The instances of one runtime in a heap, least loaded first."""

    def __init__(self) -> None:
        self.loads: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._pushed = 0

    def set(self, instance: int, load: int) -> None:
        self.loads[instance] = load
        self._pushed += 1
        if len(self._heap) > _STALE * len(self.loads):
            self._heap = [(each, at, name) for at, (name, each) in enumerate(self.loads.items(), self._pushed)]
            self._pushed += len(self._heap)
            heapify(self._heap)
        else:
            heappush(self._heap, (load, self._pushed, instance))

    def remove(self, instance: int) -> None:
        del self.loads[instance]

    def head(self) -> tuple[int, int]:
        heap, loads = self._heap, self.loads
        while True:
            load, _, instance = heap[0]
            if loads.get(instance) == load:
                return load, instance
            heappop(heap)


class LoadBuckets:
    """Instances of one runtime by load. Bit n of `mask` is set if an instance has load n."""

    def __init__(self) -> None:
        self.loads: dict[int, int] = {}
        self.mask = 0
        self._buckets: dict[int, dict[int, None]] = {}

    def set(self, instance: int, load: int) -> None:
        if instance in self.loads:
            self.remove(instance)
        self.loads[instance] = load
        self._buckets.setdefault(load, {})[instance] = None
        self.mask |= 1 << load

    def remove(self, instance: int) -> None:
        load = self.loads.pop(instance)
        del self._buckets[load][instance]
        if not self._buckets[load]:
            self.mask ^= 1 << load

    def least(self) -> int:
        return (self.mask & -self.mask).bit_length() - 1

    def greatest_below(self, limit: int) -> int:
        return (self.mask & ((1 << limit) - 1)).bit_length() - 1

    def instance_of(self, load: int) -> int:
        return next(reversed(self._buckets[load]))


class RandomLevel:
    def __init__(self) -> None:
        self.loads: dict[int, int] = {}
        self.instances: list[int] = []

    def set(self, instance: int, load: int) -> None:
        if instance not in self.loads:
            self.instances.append(instance)
        self.loads[instance] = load

    def remove(self, instance: int) -> None:
        del self.loads[instance]
        self.instances.remove(instance)


Runtimes = Sequence[tuple[int, int]]
"""Pairs of length in tokens and capacity, shortest first."""
Choose = Callable[[Sequence[Any], Sequence[int], int], int]
"""Choose an instance by levels, capacities, and the index of the first runtime that is long enough."""


class Dispatcher:
    def __init__(self, runtimes: Runtimes, level: Callable[[], Any], choose: Choose) -> None:
        self._lengths, self._capacities = ([each[at] for each in runtimes] for at in (0, 1))
        self._levels = [level() for _ in runtimes]
        self._level_of: dict[int, Any] = {}
        self._choose = choose

    def add(self, instance: int, runtime: int) -> None:
        level = self._level_of[instance] = self._levels[runtime]
        level.set(instance, 0)

    def remove(self, instance: int) -> None:
        self._level_of.pop(instance).remove(instance)

    def take(self, tokens: int) -> int:
        instance = self._choose(self._levels, self._capacities, bisect_left(self._lengths, tokens))
        level = self._level_of[instance]
        level.set(instance, level.loads[instance] + 1)
        return instance

    def done(self, instance: int) -> None:
        level = self._level_of[instance]
        level.set(instance, level.loads[instance] - 1)

    def load(self, instance: int) -> int:
        return int(self._level_of[instance].loads[instance])


def runtime_queues(runtimes: Runtimes, *, threshold: float = THRESHOLD, peeked: int = PEEKED) -> Dispatcher:
    """Return a dispatcher over the policy's `choose_head` without I/O. One heap per runtime costs less than the
    `LoadIndex` of a session.
    """
    thresholds = load_thresholds_by_level(threshold=threshold, decay=DECAY, peeked=peeked)

    def heads(levels: Sequence[HeapLevel], capacities: Sequence[int], first: int) -> Iterator[tuple[int, int, int]]:
        for at in range(first, len(levels)):
            if levels[at].loads:
                load, head = levels[at].head()
                yield load, capacities[at], head

    def choose(levels: Sequence[HeapLevel], capacities: Sequence[int], first: int) -> int:
        chosen, _ = choose_head(heads(levels, capacities, first), thresholds)
        assert chosen is not None  # The longest runtime always has an instance.
        return chosen

    return Dispatcher(runtimes, HeapLevel, choose)


def random_dispatcher(runtimes: Runtimes, seed: int) -> Dispatcher:
    """Send every request to a random instance. All instances have one runtime."""
    rng = Random(f"dispatch {seed}")

    def choose(levels: Sequence[RandomLevel], capacities: Sequence[int], first: int) -> int:  # noqa: ARG001
        instances = levels[0].instances
        return instances[int(rng.random() * len(instances))]

    return Dispatcher(runtimes, RandomLevel, choose)


def inter_groups_greedy(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> int:  # noqa: ARG001
    level = min((level for level in levels[first:] if level.loads), key=LoadBuckets.least)
    return level.instance_of(level.least())


def pack_any_runtime(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> int:
    each = zip(levels[first:], capacities[first:], strict=True)
    room = [(level, most, load) for level, most in each if (load := level.greatest_below(most)) >= 0]
    if not room:
        return _least_busy(levels, capacities, first)
    level, _, load = max(room, key=lambda one: one[2] / one[1])
    return level.instance_of(load)


def pack_shortest_runtime(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> int:
    for level in levels[first:]:
        if (load := level.greatest_below(_ROOM)) >= 0:
            return level.instance_of(load)
    return _least_busy(levels, capacities, first)


def _least_busy(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> int:
    there = [each for each in zip(levels[first:], capacities[first:], strict=True) if each[0].loads]
    level, _ = min(there, key=lambda each: each[0].least() / each[1])
    return level.instance_of(level.least())


RUNTIMES = ((128, 80), (256, 40), (512, 20))
GPUS = ((1, 0, 79), (0, 0, 78), (2, 1, 28), (3, 2, 6))
"""GPUs of Figure 4: number, runtime index, requests. GPU1 is first, so the earlier requests fill GPU1 before GPU0."""
FIRST, LATER = (100,) * 8, (400,) * 14
PATIENT = 0.99
"""With this threshold, Algorithm 1 demotes requests as in the paper."""


def strategies() -> Iterator[tuple[str, Dispatcher]]:
    yield "ILB", runtime_queues(RUNTIMES, peeked=1)
    yield "IG", Dispatcher(RUNTIMES, LoadBuckets, inter_groups_greedy)
    for threshold in (THRESHOLD, PATIENT):
        yield f"Algorithm 1, threshold {threshold}", runtime_queues(RUNTIMES, threshold=threshold)


def dispatch_outcome(dispatcher: Dispatcher) -> tuple[list[int], int]:
    """Return the number of the first eight requests per GPU, and the number of late requests."""
    for gpu, runtime, has in GPUS:
        dispatcher.add(gpu, runtime)
        for _ in range(has):
            dispatcher.take(RUNTIMES[runtime][0])
    capacities = {gpu: RUNTIMES[runtime][1] for gpu, runtime, _ in GPUS}
    got, late = [0, 0, 0, 0], 0
    for number, tokens in enumerate((*FIRST, *LATER)):
        gpu = dispatcher.take(tokens)
        late += dispatcher.load(gpu) > capacities[gpu]
        got[gpu] += number < len(FIRST)
    return got, late
