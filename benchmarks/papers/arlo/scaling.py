"""What is decided beside requests: Arlo's reallocation, and when devices are added and released.

Reallocation (§3.3) takes the lengths of the last 120 s. Target tracking (§4) adds a device for the longest runtime when
the 98th percentile of recent requests reaches 95 % of the objective, and releases the least busy one when that of the
last minute is below 50 %. ST, DT and INFaaS add devices by INFaaS's headroom (§5, compared schemes): as many as can do
1.05 times the work of the last five seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import ceil

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.fleet import Agenda, Fleet, Replacements
from benchmarks.papers.arlo.workload import Trace

_LOOK_BACK_S = 10.0
"""A request that took longer is not found among the recent ones."""
_ENOUGH = 100
"""Requests that a percentile needs."""


Allocator = Callable[[int, Sequence[int], float], Sequence[int]]
"""Devices of each runtime, by how many there are, the lengths of requests, and how many come in a second."""


class Reallocation:
    """Arlo's Runtime Scheduler. The first time is the middle of a run that is shorter than two periods."""

    def __init__(
        self, trace: Trace, fleet: Fleet, agenda: Agenda, allocation: Allocator, *, for_s: float
    ) -> None:  # fmt: skip
        self._trace, self._fleet, self._agenda, self._allocation = trace, fleet, agenda, allocation
        self._replacements = Replacements(fleet)
        agenda.at(min(settings.PERIOD_S, for_s / 2), self._run)

    def _run(self, now: float) -> None:
        times = self._trace.times
        window_s = min(now, settings.PERIOD_S)
        first, last = bisect_left(times, now - window_s), bisect_left(times, now)
        if first < last:
            rate = (last - first) / window_s
            target = self._allocation(self._fleet.devices, self._trace.lengths[first:last], rate)
            self._replacements.decide(target, now)
        self._agenda.at(now + settings.PERIOD_S, self._run)


class TargetTracking:
    """Arlo's scaling by the 98th percentile. It looks every second."""

    def __init__(
        self, trace: Trace, fleet: Fleet, agenda: Agenda, latencies: Sequence[float], slo_s: float, least: int
    ) -> None:  # fmt: skip
        self._times, self._latencies, self._slo_s, self._least = trace.times, latencies, slo_s, least
        self._fleet, self._agenda = fleet, agenda
        self._next_up_at, self._down_at = 0.0, settings.SCALE_DOWN_EVERY_S
        agenda.at(1.0, self._run)

    def _run(self, now: float) -> None:
        recent = self._p98(now - settings.RECENT_S, now) if now >= self._next_up_at else None
        if recent is not None and recent >= settings.SCALE_UP_AT * self._slo_s:
            self._fleet.scale_up(len(self._fleet.counts) - 1, now)
            self._next_up_at = now + settings.REPLACEMENT_S + settings.RECENT_S
        if now >= self._down_at:
            self._down_at = now + settings.SCALE_DOWN_EVERY_S
            of_minute = self._p98(now - settings.SCALE_DOWN_EVERY_S, now)
            if of_minute is not None and of_minute < settings.SCALE_DOWN_AT * self._slo_s:
                release_one(self._fleet, now, least=self._least)
        self._agenda.at(now + 1.0, self._run)

    def _p98(self, since: float, now: float) -> float | None:
        """Of the requests that have ended since then; None where they are few."""
        first = bisect_left(self._times, since - _LOOK_BACK_S)
        last = min(bisect_left(self._times, now), len(self._latencies))
        found = [
            latency
            for arrived, latency in zip(self._times[first:last], self._latencies[first:last], strict=True)
            if since < arrived + latency <= now
        ]
        return percentile(sorted(found), 0.98) if len(found) >= _ENOUGH else None


class Headroom:
    """INFaaS's scaling by the work of the last seconds. It looks every second."""

    def __init__(self, fleet: Fleet, agenda: Agenda, least: int) -> None:
        self._fleet, self._agenda, self._least = fleet, agenda, least
        self._work_s = [0.0]
        self._enough_since = 0.0
        agenda.at(1.0, self._run)

    def _run(self, now: float) -> None:
        self._work_s = [*self._work_s, self._fleet.work_s][-int(settings.HEADROOM_OVER_S) - 1 :]
        busy = (self._work_s[-1] - self._work_s[0]) / (len(self._work_s) - 1)
        needed = max(self._least, ceil(settings.HEADROOM * busy))
        if needed >= self._fleet.devices:
            self._enough_since = now
        for _ in range(needed - self._fleet.devices):
            self._fleet.scale_up(self._scarcest(), now)
        if now - self._enough_since >= settings.HEADROOM_STAYS_S:
            release_one(self._fleet, now, least=self._least)
            self._enough_since = now
        self._agenda.at(now + 1.0, self._run)

    def _scarcest(self) -> int:
        """The runtime with the fewest instances; the longest of those."""
        counts = self._fleet.counts
        return min(range(len(counts)), key=lambda runtime: (counts[runtime], -runtime))


def release_one(fleet: Fleet, now: float, *, least: int) -> None:
    """Release the least busy instance, but not the last one of the longest runtime, nor one of the least number."""
    if fleet.devices <= least:
        return
    longest = len(fleet.counts) - 1
    serving = {runtime: fleet.serving(runtime) for runtime in range(len(fleet.counts))}
    free = [found[0] for runtime, found in serving.items() if len(found) > (runtime == longest)]
    if free:
        fleet.release(min(free, key=fleet.dispatcher.load), now)


def percentile(rising: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted values lies; 0.5 is the median."""
    return rising[min(len(rising) - 1, int(share * len(rising)))]
