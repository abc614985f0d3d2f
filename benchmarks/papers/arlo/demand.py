"""Devices of each runtime: Arlo's allocation of what a length distribution asks for, and an even one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.papers.arlo.profile import LatencyProfile
from stoker.manager.policies.arlo.allocation import LatencyTable, NotEnoughDevicesError, RuntimeDemand, allocate

_LESS = 0.97
"""Where requests fill more devices than there are, all of them are taken times this until they do not."""


def demands(
    lengths: Iterable[int], rate: float, runtimes: Sequence[int], profile: LatencyProfile, *, overload_s: float = 0.0
) -> list[RuntimeDemand]:
    """What requests of these lengths, at so many a second, ask of each runtime during one objective (§3.3).

    `overload_s`: what a request more than the capacity adds to the mean latency of its instance. With 0 the latency
    goes on as within the capacity. It concerns the longest runtime alone, as eq. 5 lets no other one have more.
    """
    counts = Counter(lengths)
    total = sum(counts.values())
    found, below = [], 0
    for length in runtimes:
        share = sum(counts[tokens] for tokens in range(below + 1, length + 1)) / total
        capacity = profile.capacity(length)
        latency = LatencyTable.one_by_one(profile.static_s(length), capacity=capacity)
        if overload_s:
            full, mean_s = latency.points[-1]
            latency = LatencyTable((*latency.points, (full + 1, mean_s + overload_s)))
        found.append(RuntimeDemand(share * rate * profile.slo_s, capacity, latency))
        below = length
    return found


def best_allocation(devices: int, wanted: Sequence[RuntimeDemand]) -> tuple[int, ...]:
    """Arlo's allocation; where eqs 3 and 7 cannot hold, that of the same mix with fewer requests."""
    while True:
        try:
            return allocate(devices, wanted).instances
        except NotEnoughDevicesError:
            wanted = [msgspec.structs.replace(each, requests=each.requests * _LESS) for each in wanted]


def even_allocation(devices: int, runtimes: int) -> tuple[int, ...]:
    """As many devices for each runtime; where some get one more, or some none, the extra ones lie evenly spaced, with
    one for the longest."""
    counts = [devices // runtimes] * runtimes
    extra = devices % runtimes
    for number in range(extra):
        counts[runtimes - 1 - number * runtimes // extra] += 1
    return tuple(counts)
