"""Generate requests (arrival times and lengths), and the latency of a runtime by length (§2).

Latency increases in steps of 64 tokens (§3.3), linearly from the first to the last step. Within a step, the ratio at 20
tokens gives the latency (§2). Lengths come from tweets times 512/125 (§5), at most 512. Lengths do not drift in the two
parts of the file, so we vary the share of part two: in a slow wave, and randomly each second. Arrivals are Poisson
(`stable`) or Markov-modulated (`bursty`).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from functools import lru_cache
from math import ceil, log, pi, sin
from random import Random

import msgspec

from benchmarks.papers import common
from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.settings import BASE_MS, SLO_S

LONGEST = 512
STEP = 64
RATIO = {"base": 4.22, "large": 5.25}
"""Ratio of latencies at 512 and 64 tokens (§2.1)."""
RATIO_20 = 4.28
"""Ratio of latencies at 512 and 20 tokens of Bert-Base (§2.2)."""
_WITHIN_STEP = (1 - RATIO["base"] / RATIO_20) * STEP / (STEP - 20)
INFLATION = 1.22, 3.56
"""Minimum and maximum inflation by dynamic compilation (§2.2)."""


class LatencyProfile(msgspec.Struct, frozen=True):
    model: str
    longest_ms: float = BASE_MS

    @property
    def slo_s(self) -> float:
        return SLO_S[self.model]

    def static_s(self, tokens: int) -> float:
        step = max(1, ceil(tokens / STEP))
        first = 1 / RATIO[self.model]
        at_step = first + (1 - first) * (step - 1) / (LONGEST // STEP - 1)
        below = (step * STEP - max(1, tokens)) / STEP
        return self.longest_ms / 1000 * at_step * (1 - _WITHIN_STEP * below)

    def dynamic_s(self, tokens: int, shape: str) -> float:
        """Return the seconds with dynamic compilation, whose inflation is flat, rises or falls with the length."""
        (least, most), along = INFLATION, (tokens - 1) / (LONGEST - 1)
        most = {"flat": least, "mild": settings.MILD_INFLATION}.get(shape, most)
        return self.static_s(tokens) * (least + (most - least) * (1 - along if shape == "falling" else along))

    def capacity(self, tokens: int) -> int:
        return max(1, int(self.slo_s / self.static_s(tokens)))

    def mean_s(self, lengths: list[int], runtimes: int) -> float:
        step = LONGEST // runtimes
        by_length = [self.static_s(step * max(1, ceil(tokens / step))) for tokens in range(LONGEST + 1)]
        return sum(by_length[tokens] for tokens in lengths) / len(lengths)


def lengths_of(runtimes: int) -> tuple[int, ...]:
    return tuple(LONGEST * (number + 1) // runtimes for number in range(runtimes))


LENGTHS = common.DATA / "lengths" / "tweet_token_lengths.csv.gz"
LONG_ROWS_FROM = 100_000
EARLIER = 20_000


class Workload(msgspec.Struct, frozen=True):
    """`rate`: mean requests per second. `pattern`: `stable`, `bursty`, or a name in `settings`.

    `swings`: True if the rate varies over minutes (Figure 8). `drift`: strength of the drift relative to `settings`.
    """

    rate: float
    for_s: float
    seed: int
    pattern: str = "stable"
    swings: bool = False
    drift: float = 1.0


class Trace(msgspec.Struct, frozen=True):
    """Arrival times, lengths, and lengths of the previous period."""

    times: list[float]
    lengths: list[int]
    earlier: list[int]


def missing() -> str:
    return common.missing(LENGTHS, "the lengths of tweets are")


@lru_cache(maxsize=1)
def read_lengths() -> tuple[list[int], list[int]]:
    with gzip.open(LENGTHS, "rt") as file:
        next(file)
        rows = [max(1, min(LONGEST, round(int(line) * settings.SPAN))) for line in file]
    return rows[:LONG_ROWS_FROM], rows[LONG_ROWS_FROM:]


@lru_cache(maxsize=2)
def trace_of(workload: Workload) -> Trace:
    return make_trace(workload, *read_lengths())


def make_trace(workload: Workload, short: list[int], long: list[int]) -> Trace:
    times = list(_arrivals(workload, Random(f"arrivals {workload.seed}")))
    rng = Random(f"lengths {workload.seed}")
    phase, swing = 2 * pi * rng.random(), workload.drift * settings.LONG_SWING
    wave_s = settings.RATED_SECONDS_S.get(workload.pattern, settings.DRIFT_PERIOD_S)

    def share(at: float) -> float:
        return settings.LONG_SHARE + swing * sin(2 * pi * at / wave_s + phase)

    lengths: list[int] = []
    at, of_second = 0, 0.0
    for arrived in times:
        if arrived >= at:
            at = int(arrived) + 1
            of_second = share(arrived) * (1 + settings.SECOND_SWING * (2 * rng.random() - 1))
        pool = long if rng.random() < of_second else short
        lengths.append(pool[int(rng.random() * len(pool))])
    spread = (-settings.PERIOD_S * rng.random() for _ in range(EARLIER))
    earlier = [rng.choice(long if rng.random() < share(before) else short) for before in spread]
    return Trace(times, lengths, earlier)


def _arrivals(workload: Workload, rng: Random) -> Iterator[float]:
    for at, end, rate in _burst_intervals(workload, rng):
        while (at := at - log(1.0 - rng.random()) / rate) < end:
            yield at


def _burst_intervals(workload: Workload, rng: Random) -> Iterator[tuple[float, float, float]]:
    at, is_burst = 0.0, rng.random() < settings.BURST_S / (settings.BURST_S + settings.CALM_S)
    burst = settings.MILD_BURST_RATES.get(workload.pattern, settings.BURST_RATE)
    calm = (settings.BURST_S + settings.CALM_S - settings.BURST_S * burst) / settings.CALM_S
    second, of_second = -1, 1.0
    while at < workload.for_s:
        rate, lasts = workload.rate, 1.0
        if workload.pattern in settings.RATED_SECONDS_S:
            if int(at) > second:
                second, of_second = int(at), 1 + settings.RATE_SWING * (2 * rng.random() - 1)
            rate *= of_second
        if workload.pattern != "stable":
            rate *= burst if is_burst else calm
            lasts = rng.expovariate(1 / (settings.BURST_S if is_burst else settings.CALM_S))
            is_burst = not is_burst
        if workload.swings:
            rate *= 1 - settings.LOAD_SWING * sin(2 * pi * at / settings.LOAD_PERIOD_S)
        yield at, min(at + lasts, workload.for_s), rate
        at += lasts
