"""Choose instances: by Algorithm 1 (`RuntimeQueues`) and as in the other systems; simulate the example of Figure 4.

`RuntimeQueues` calls the policy's `choose_head` without I/O. A session uses `LoadIndex` of the core; a heap per runtime
costs less for instances without slots.

INFaaS uses the busiest instance that is long enough and has free capacity (§5). Variant 1: the instance can answer in
time; all runtimes count. Variant 2: the shortest runtime with an instance where at most one request waits.
Inter-groups Greedy (§5.2.3) uses the least loaded instance that is long enough. ST and DT balance load (§5): by the
least loaded instance, or at random.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from random import Random

import msgspec

from stoker.manager.policies.arlo.dispatch import DECAY, PEEKED, THRESHOLD, choose_head, load_thresholds_by_level

_STALE = 4
"""Heap entries per instance that trigger a cleanup of a level."""


class _RuntimeLevel:
    """The instances of one runtime in a heap, least loaded first."""

    def __init__(self, length: int, capacity: int) -> None:
        self.length = length
        self.capacity = capacity
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

    def head(self) -> tuple[int, int]:
        """Return the least load and its instance."""
        heap, loads = self._heap, self.loads
        while True:
            load, _, instance = heap[0]
            if loads.get(instance) == load:
                return load, instance
            heappop(heap)


class RuntimeQueues:
    """Instances of every runtime by load. `runtimes`: increasing lengths in tokens, with capacities."""

    def __init__(
        self, runtimes: Sequence[tuple[int, int]], *, threshold: float = THRESHOLD, decay: float = DECAY,
        peeked: int = PEEKED,
    ) -> None:  # fmt: skip
        self._lengths = [length for length, _ in runtimes]
        if not runtimes or any(a >= b for a, b in zip(self._lengths, self._lengths[1:], strict=False)):
            raise ValueError(f"runtimes have rising lengths, at least one: {self._lengths}")
        self._levels: list[_RuntimeLevel] = [_RuntimeLevel(length, capacity) for length, capacity in runtimes]
        self._level_of: dict[int, _RuntimeLevel] = {}
        self._thresholds = load_thresholds_by_level(threshold=threshold, decay=decay, peeked=peeked)

    def add(self, instance: int, runtime: int) -> None:
        level = self._level_of[instance] = self._levels[runtime]
        level.set(instance, 0)

    def remove(self, instance: int) -> None:
        del self._level_of.pop(instance).loads[instance]

    def take(self, tokens: int) -> int:
        chosen, _ = choose_head(self._heads(tokens), self._thresholds)
        if chosen is None:
            longest = max((level.length for level in self._level_of.values()), default=0)
            raise ValueError(f"a request of {tokens} tokens, and the longest runtime takes {longest}")
        level = self._level_of[chosen]
        level.set(chosen, level.loads[chosen] + 1)
        return chosen

    def done(self, instance: int) -> None:
        level = self._level_of[instance]
        level.set(instance, level.loads[instance] - 1)

    def load(self, instance: int) -> int:
        return self._level_of[instance].loads[instance]

    def _heads(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield load, capacity and head of each runtime that is long enough and has instances."""
        levels = self._levels
        for at in range(bisect_left(self._lengths, tokens), len(levels)):
            level = levels[at]
            if level.loads:
                load, head = level.head()
                yield load, level.capacity, head


class LoadBuckets:
    """Instances of one runtime by load. Bit n of `mask` is set if an instance has load n."""

    def __init__(self) -> None:
        self.mask = 0
        self._buckets: dict[int, dict[int, None]] = {}

    def put(self, instance: int, load: int) -> None:
        self._buckets.setdefault(load, {})[instance] = None
        self.mask |= 1 << load

    def remove(self, instance: int, load: int) -> None:
        bucket = self._buckets[load]
        del bucket[instance]
        if not bucket:
            self.mask ^= 1 << load

    def least(self) -> int:
        return (self.mask & -self.mask).bit_length() - 1

    def greatest_below(self, limit: int) -> int:
        return (self.mask & ((1 << limit) - 1)).bit_length() - 1

    def any_instance_of(self, load: int) -> int:
        return next(reversed(self._buckets[load]))


Choose = Callable[[Sequence[LoadBuckets], Sequence[int], int], tuple[int, int]]
"""Choose a runtime from the given index on, and the load of one of its instances."""


class BucketDispatcher:
    """Instances by load. `runtimes`: pairs of length and capacity."""

    def __init__(self, runtimes: Sequence[tuple[int, int]], choose: Choose) -> None:
        self._lengths = [length for length, _ in runtimes]
        self._capacities = [capacity for _, capacity in runtimes]
        self._levels = [LoadBuckets() for _ in runtimes]
        self._level_of: dict[int, LoadBuckets] = {}
        self._loads: dict[int, int] = {}
        self._choose = choose

    def add(self, instance: int, runtime: int) -> None:
        level = self._level_of[instance] = self._levels[runtime]
        self._loads[instance] = 0
        level.put(instance, 0)

    def remove(self, instance: int) -> None:
        self._level_of.pop(instance).remove(instance, self._loads.pop(instance))

    def take(self, tokens: int) -> int:
        runtime, load = self._choose(self._levels, self._capacities, bisect_left(self._lengths, tokens))
        instance = self._levels[runtime].any_instance_of(load)
        self._change_load(instance, load, load + 1)
        return instance

    def done(self, instance: int) -> None:
        load = self._loads[instance]
        self._change_load(instance, load, load - 1)

    def load(self, instance: int) -> int:
        return self._loads[instance]

    def _change_load(self, instance: int, old: int, new: int) -> None:
        level = self._level_of[instance]
        level.remove(instance, old)
        level.put(instance, new)
        self._loads[instance] = new


class RandomDispatcher:
    """Send every request to a random instance. All instances have one runtime."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"dispatch {seed}")
        self._instances: list[int] = []
        self._loads: dict[int, int] = {}

    def add(self, instance: int, runtime: int) -> None:
        if runtime:
            raise ValueError(f"random dispatch is for systems with one runtime; instance {instance} has another one")
        self._instances.append(instance)
        self._loads[instance] = 0

    def remove(self, instance: int) -> None:
        self._instances.remove(instance)
        del self._loads[instance]

    def take(self, tokens: int) -> int:
        del tokens
        instance = self._instances[int(self._rng.random() * len(self._instances))]
        self._loads[instance] += 1
        return instance

    def done(self, instance: int) -> None:
        self._loads[instance] -= 1

    def load(self, instance: int) -> int:
        return self._loads[instance]


Dispatcher = BucketDispatcher | RandomDispatcher | RuntimeQueues


def inter_groups_greedy(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> tuple[int, int]:
    del capacities
    return min(
        ((runtime, load) for runtime in range(first, len(levels)) if (load := levels[runtime].least()) >= 0),
        key=lambda one: one[1],
    )


def pack_any_runtime(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> tuple[int, int]:
    best, chosen, chosen_load = -1.0, -1, -1
    for runtime in range(first, len(levels)):
        load = levels[runtime].greatest_below(capacities[runtime])
        if load >= 0 and load / capacities[runtime] > best:
            best, chosen, chosen_load = load / capacities[runtime], runtime, load
    return (chosen, chosen_load) if chosen >= 0 else _least_busy(levels, capacities, first)


def pack_shortest_runtime(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> tuple[int, int]:
    for runtime in range(first, len(levels)):
        load = levels[runtime].greatest_below(_ROOM)
        if load >= 0:
            return runtime, load
    return _least_busy(levels, capacities, first)


_ROOM = 2
"""Number of requests of a full instance in variant 2."""


def _least_busy(levels: Sequence[LoadBuckets], capacities: Sequence[int], first: int) -> tuple[int, int]:
    there = ((runtime, load) for runtime in range(first, len(levels)) if (load := levels[runtime].least()) >= 0)
    return min(there, key=lambda one: one[1] / capacities[one[0]])


RUNTIMES = ((128, 80), (256, 40), (512, 20))
GPUS = ((1, 0, 79), (0, 0, 78), (2, 1, 28), (3, 2, 6))
"""GPUs of Figure 4: number, runtime, requests. GPU1 is first, so earlier requests fill GPU0 second."""
FIRST, LATER = (100,) * 8, (400,) * 14
PATIENT = 0.99
"""Threshold with which Algorithm 1 demotes requests like in the paper."""


class Outcome(msgspec.Struct, frozen=True):
    """Number of the first eight requests per GPU, and number of late requests."""

    first: tuple[int, int, int, int]
    late: int


def strategies() -> Iterator[tuple[str, Dispatcher]]:
    yield "ILB", RuntimeQueues(RUNTIMES, peeked=1)
    yield "IG", BucketDispatcher(RUNTIMES, inter_groups_greedy)
    yield f"Algorithm 1, threshold {THRESHOLD}", RuntimeQueues(RUNTIMES)
    yield f"Algorithm 1, threshold {PATIENT}", RuntimeQueues(RUNTIMES, threshold=PATIENT)


def dispatch_outcome(dispatcher: Dispatcher) -> Outcome:
    for gpu, runtime, has in GPUS:
        dispatcher.add(gpu, runtime)
        taken = {dispatcher.take(RUNTIMES[runtime][0]) for _ in range(has)}
        if taken != {gpu}:
            raise ValueError(f"the requests before the example went to {taken}, not to {gpu} alone")
    capacities = {gpu: RUNTIMES[runtime][1] for gpu, runtime, _ in GPUS}
    got, late = [0, 0, 0, 0], 0
    for number, tokens in enumerate((*FIRST, *LATER)):
        gpu = dispatcher.take(tokens)
        late += dispatcher.load(gpu) > capacities[gpu]
        got[gpu] += number < len(FIRST)
    return Outcome((got[0], got[1], got[2], got[3]), late)
