"""Table 2 and Figure 9, measured on the machine at hand: what an allocation takes, and what dispatching a burst takes.

Table 2 solves problems of each size with lengths of tweets and loads that differ. Figure 9 gives a burst of requests,
two for each instance, to runtimes whose instances have something to do. Times are processor time.
"""

from __future__ import annotations

import statistics
import time
from random import Random

import msgspec

from benchmarks.papers.arlo.demand import demands
from benchmarks.papers.arlo.profile import lengths_of
from benchmarks.papers.arlo.tables import SLOWEST
from benchmarks.papers.arlo.workload import read_lengths
from benchmarks.papers.common import RELEASE
from stoker.manager.policies.arlo.allocation import NotEnoughDevicesError, allocate
from stoker.manager.policies.arlo.runtime_queues import RuntimeQueues

SIZES = ((50, 8), (200, 12), (1000, 16))
"""Devices and runtimes of Table 2."""
REPEATS = 20
INSTANCES = (200, 400, 600, 800, 1000, 1200)
PEEKED = (1, 2, 4, 6, 8)
LEVELS = 12
LOADS = 0.5, 0.95
"""Of the devices, in Table 2: from the least to the most."""
LIGHT = 0.7
"""The page has the problems below this load and those above it apart."""
FULL = 0.4
"""Share of the capacity that is taken before a burst of Figure 9."""
BURSTS = 5
_LENGTHS = 5_000


class SolvingTime(msgspec.Struct, frozen=True):
    """Table 2: seconds of each run, and the share of the devices that its requests keep busy."""

    devices: int
    runtimes: int
    seconds: tuple[float, ...]
    loads: tuple[float, ...]


class DispatchTime(msgspec.Struct, frozen=True):
    """Figure 9: milliseconds for the whole burst, the median of five."""

    instances: int
    requests: int
    peeked: int
    ms: float


class Measured(msgspec.Struct, frozen=True):
    """All of it. `release`: of Stoker, that was measured."""

    release: str
    solving: list[SolvingTime]
    dispatching: list[DispatchTime]


def measure_all() -> Measured:
    """Takes about a minute."""
    solving = [_solve(devices, runtimes) for devices, runtimes in SIZES]
    dispatching = [
        DispatchTime(instances, 2 * instances, peeked, round(_dispatch_ms(instances, peeked), 3))
        for instances in INSTANCES for peeked in PEEKED
    ]  # fmt: skip
    return Measured(RELEASE, solving, dispatching)


def _solve(devices: int, runtimes: int) -> SolvingTime:
    rng = Random(f"{devices} {runtimes}")
    seconds, loads = zip(*(_solve_once(devices, runtimes, rng) for _ in range(REPEATS)), strict=True)
    return SolvingTime(devices, runtimes, seconds, loads)


def _solve_once(devices: int, runtimes: int, rng: Random) -> tuple[float, float]:
    """Seconds for one problem that has a solution, and its load."""
    while True:
        share = rng.uniform(0.1, 0.5)
        short, long = read_lengths()
        lengths = [rng.choice(long if rng.random() < share else short) for _ in range(_LENGTHS)]
        load = rng.uniform(*LOADS)
        rate = load * devices / SLOWEST.mean_s(lengths, runtimes)
        wanted = demands(lengths, rate, lengths_of(runtimes), SLOWEST)
        began = time.process_time()
        try:
            allocate(devices, wanted)
        except NotEnoughDevicesError:
            continue
        return round(time.process_time() - began, 5), round(load, 3)


def _dispatch_ms(instances: int, peeked: int) -> float:
    rng = Random(f"{instances}")
    queues = RuntimeQueues[int]([(length, SLOWEST.capacity(length)) for length in lengths_of(LEVELS)], peeked=peeked)
    for instance in range(instances):
        queues.add(instance, instance % LEVELS)
    lengths = [rng.choice(pool) for _ in range(_LENGTHS) for pool in read_lengths()]
    room = sum(SLOWEST.capacity(length) for length in lengths_of(LEVELS)) * instances // LEVELS
    for _ in range(int(FULL * room)):
        queues.take(rng.choice(lengths))
    return statistics.median(
        _burst_ms(queues, [rng.choice(lengths) for _ in range(2 * instances)]) for _ in range(BURSTS)
    )


def _burst_ms(queues: RuntimeQueues[int], lengths: list[int]) -> float:
    began = time.process_time()
    taken = [queues.take(tokens) for tokens in lengths]
    spent = time.process_time() - began
    for instance in taken:
        queues.done(instance)
    return 1000 * spent
