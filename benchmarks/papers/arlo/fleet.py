"""Manage devices per runtime: replacement of instances (§4), Arlo's reallocation (§3.3), and scaling.

An instance answers requests one by one, in order, so the end of a request is known at dispatch. A replaced instance
finishes its requests, then is out of service for one second, like an added device. Target tracking (§4) adds a device
for the longest runtime, and releases the least busy device. ST, DT and INFaaS use the headroom of INFaaS (§5).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from math import ceil, inf

import msgspec

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.dispatch import Dispatcher
from benchmarks.papers.arlo.workload import LatencyProfile, Trace
from stoker.manager.policies.arlo.allocation import LatencyTable, NotEnoughDevicesError, RuntimeDemand, allocate

_LESS = 0.97
"""Factor that reduces the demand until the devices suffice."""


def runtime_demands(
    lengths: Iterable[int], rate: float, runtimes: Sequence[int], profile: LatencyProfile, *, overload_s: float = 0.0
) -> list[RuntimeDemand]:
    """Return the demand on each runtime during one objective period (§3.3), from request lengths and `rate` per second.

    `overload_s`: added mean latency of the longest runtime per request above the capacity of an instance (eq. 5).
    """
    counts = Counter(lengths)
    total = sum(counts.values())
    found = []
    for below, length in zip((0, *runtimes), runtimes, strict=False):
        share = sum(counts[tokens] for tokens in range(below + 1, length + 1)) / total
        capacity = profile.capacity(length)
        latency = LatencyTable.with_batch_size_one(profile.static_s(length), capacity=capacity)
        if overload_s:
            full, mean_s = latency.points[-1]
            latency = LatencyTable((*latency.points, (full + 1, mean_s + overload_s)))
        found.append(RuntimeDemand(share * rate * profile.slo_s, capacity, latency))
    return found


def best_allocation(devices: int, wanted: Sequence[RuntimeDemand]) -> tuple[int, ...]:
    while True:
        try:
            return allocate(devices, wanted).instances
        except NotEnoughDevicesError:
            wanted = [msgspec.structs.replace(each, requests=each.requests * _LESS) for each in wanted]


def even_allocation(devices: int, runtimes: int) -> tuple[int, ...]:
    each, extra = divmod(devices, runtimes)
    counts = [each] * runtimes
    for number in range(extra):
        counts[runtimes - 1 - number * runtimes // extra] += 1
    return tuple(counts)


class Agenda:
    def __init__(self) -> None:
        self.next_at = inf
        self._entries: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def schedule(self, when: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heappush(self._entries, (when, self._count, action))
        self.next_at = self._entries[0][0]

    def run_next(self) -> None:
        when, _, action = heappop(self._entries)
        self.next_at = self._entries[0][0] if self._entries else inf
        action(when)


class Fleet:
    """All devices. `rows`: for each runtime, seconds of a request by length."""

    def __init__(self, dispatcher: Dispatcher, rows: Sequence[Sequence[float]]) -> None:
        self.dispatcher, self.agenda = dispatcher, Agenda()
        self.latencies: list[float] = []
        self.rows, self.free_at, self.serves = list[Sequence[float]](), list[float](), list[bool]()
        self.counts = [0] * len(rows)
        """Instances of each runtime, including instances that start."""
        self.work_s = 0.0
        """Computing seconds of all requests without padding."""
        self.out, self.most_out, self.replaced = 0, 0, 0
        """Instances out of service for a replacement (current, maximum), and number of all replacements."""
        self._runtime_rows, self._runtime_of = rows, list[int]()
        self._device_s, self._devices, self._counted_at = 0.0, 0, 0.0

    def start(self, counts: Sequence[int]) -> None:
        for runtime, count in enumerate(counts):
            for _ in range(count):
                self._add(runtime, 0.0)
            self.counts[runtime] = count
        self._count_devices(0.0, sum(counts))

    def serving(self, runtime: int) -> list[int]:
        found = [one for one, at in enumerate(self._runtime_of) if at == runtime and self.serves[one]]
        return sorted(found, key=self.dispatcher.load)

    def scale_up(self, runtime: int, now: float) -> None:
        self._count_devices(now, 1)
        self.counts[runtime] += 1
        self.agenda.schedule(now + settings.REPLACEMENT_S, lambda at: self._add(runtime, at))

    def release(self, instance: int, now: float) -> None:
        self.counts[self._runtime_of[instance]] -= 1
        self.agenda.schedule(self._retire(instance, now), lambda at: self._count_devices(at, -1))

    def replace(self, instance: int, runtime: int, now: float, *, then: Callable[[float], None]) -> None:
        self.counts[self._runtime_of[instance]] -= 1
        self.counts[runtime] += 1
        self.out += 1
        self.replaced += 1
        self.most_out = max(self.most_out, self.out)

        def return_to_service(at: float) -> None:
            self.out -= 1
            self._add(runtime, at)
            then(at)

        self.agenda.schedule(self._retire(instance, now) + settings.REPLACEMENT_S, return_to_service)

    def device_s(self, until: float) -> float:
        return self._device_s + (until - self._counted_at) * self._devices

    @property
    def devices(self) -> int:
        return sum(self.counts)

    def _add(self, runtime: int, now: float) -> None:
        self.rows.append(self._runtime_rows[runtime])
        self.free_at.append(now)
        self.serves.append(True)
        self._runtime_of.append(runtime)
        self.dispatcher.add(len(self.rows) - 1, runtime)

    def _retire(self, instance: int, now: float) -> float:
        self.dispatcher.remove(instance)
        self.serves[instance] = False
        return max(now, self.free_at[instance])

    def _count_devices(self, now: float, more: int) -> None:
        self._device_s, self._counted_at = self.device_s(now), now
        self._devices += more


Allocator = Callable[[int, Sequence[int], float], Sequence[int]]
"""Return devices per runtime, from all devices, request lengths, and requests per second."""


class Reallocation:
    """Arlo's Runtime Scheduler, which makes as few replacements as possible, and few at a time. In a run shorter than
    two periods the first allocation is in the middle.
    """

    def __init__(self, trace: Trace, fleet: Fleet, allocation: Allocator, *, for_s: float) -> None:
        self._trace, self._fleet, self._allocation = trace, fleet, allocation
        self._target: Sequence[int] = ()
        fleet.agenda.schedule(min(settings.PERIOD_S, for_s / 2), self._run)

    def _run(self, now: float) -> None:
        times = self._trace.times
        window_s = min(now, settings.PERIOD_S)
        first, last = bisect_left(times, now - window_s), bisect_left(times, now)
        if first < last:
            rate = (last - first) / window_s
            self._target = self._allocation(self._fleet.devices, self._trace.lengths[first:last], rate)
            self._start_replacements(now)
        self._fleet.agenda.schedule(now + settings.PERIOD_S, self._run)

    def _start_replacements(self, now: float) -> None:
        most = max(1, int(settings.REPLACED_AT_ONCE * self._fleet.devices))
        while self._fleet.out < most and (found := self._next_replacement()) is not None:
            self._fleet.replace(*found, now, then=self._start_replacements)

    def _next_replacement(self) -> tuple[int, int] | None:
        over = [have - want for have, want in zip(self._fleet.counts, self._target, strict=True)]
        missing = over.index(min(over))
        for runtime in sorted(range(len(over)), key=lambda runtime: -over[runtime]):
            serving = self._fleet.serving(runtime)
            if over[missing] < 0 < over[runtime] and len(serving) > (runtime == len(over) - 1):
                return serving[0], missing
        return None


_LOOK_BACK_S = 10.0
_ENOUGH = 100


def track_target(trace: Trace, fleet: Fleet, slo_s: float, least: int) -> None:
    next_up_at, down_at = 0.0, settings.SCALE_DOWN_EVERY_S

    def p98(since: float, now: float) -> float | None:
        first = bisect_left(trace.times, since - _LOOK_BACK_S)
        last = min(bisect_left(trace.times, now), len(fleet.latencies))
        pairs = zip(trace.times[first:last], fleet.latencies[first:last], strict=True)
        found = [latency for arrived, latency in pairs if since < arrived + latency <= now]
        return percentile(sorted(found), 0.98) if len(found) >= _ENOUGH else None

    def scale(now: float) -> None:
        nonlocal next_up_at, down_at
        recent = p98(now - settings.RECENT_S, now) if now >= next_up_at else None
        if recent is not None and recent >= settings.SCALE_UP_AT * slo_s:
            fleet.scale_up(len(fleet.counts) - 1, now)
            next_up_at = now + settings.REPLACEMENT_S + settings.RECENT_S
        if now >= down_at:
            down_at = now + settings.SCALE_DOWN_EVERY_S
            of_minute = p98(now - settings.SCALE_DOWN_EVERY_S, now)
            if of_minute is not None and of_minute < settings.SCALE_DOWN_AT * slo_s:
                release_one(fleet, now, least=least)
        fleet.agenda.schedule(now + 1.0, scale)

    fleet.agenda.schedule(1.0, scale)


def keep_headroom(fleet: Fleet, least: int) -> None:
    """Scale as INFaaS does, by the work of recent seconds."""
    work_s, enough_since = [0.0], 0.0

    def scale(now: float) -> None:
        nonlocal enough_since
        work_s.append(fleet.work_s)
        del work_s[: -int(settings.HEADROOM_OVER_S) - 1]
        busy = (work_s[-1] - work_s[0]) / (len(work_s) - 1)
        needed, counts = max(least, ceil(settings.HEADROOM * busy)), fleet.counts
        if needed >= fleet.devices:
            enough_since = now
        for _ in range(needed - fleet.devices):
            fleet.scale_up(min(range(len(counts)), key=lambda runtime: (counts[runtime], -runtime)), now)
        if now - enough_since >= settings.HEADROOM_STAYS_S:
            release_one(fleet, now, least=least)
            enough_since = now
        fleet.agenda.schedule(now + 1.0, scale)

    fleet.agenda.schedule(1.0, scale)


def release_one(fleet: Fleet, now: float, *, least: int) -> None:
    """Release the least busy instance, but never the last one of the longest runtime."""
    if fleet.devices <= least:
        return
    *serving, longest = (fleet.serving(runtime) for runtime in range(len(fleet.counts)))
    if free := [found[0] for found in (*serving, longest[: len(longest) - 1]) if found]:
        fleet.release(min(free, key=fleet.dispatcher.load), now)


def serve(trace: Trace, fleet: Fleet, *, occupies: bool = False) -> int:
    """Serve a trace. Return the number of requests without an instance or open at the end."""
    take, done = fleet.dispatcher.take, fleet.dispatcher.done
    rows, free_at, serves = fleet.rows, fleet.free_at, fleet.serves
    busy_s, after_s = (settings.OVERHEAD_S, 0.0) if occupies else (0.0, settings.OVERHEAD_S)
    latencies, agenda = fleet.latencies, fleet.agenda
    ends: list[tuple[float, int]] = [(inf, -1)]  # A sentinel keeps the heap non-empty.
    work_s, next_at = 0.0, agenda.next_at

    def end_until(now: float) -> None:
        while ends[0][0] <= now:
            instance = heappop(ends)[1]
            if serves[instance]:
                done(instance)

    for now, tokens in zip(trace.times, trace.lengths, strict=True):
        while next_at <= now:
            end_until(next_at)
            fleet.work_s = work_s
            agenda.run_next()
            next_at = agenda.next_at
        end_until(now)
        instance = take(tokens)
        took = rows[instance][tokens] + busy_s
        begins = free_at[instance]
        end = (begins if begins > now else now) + took
        free_at[instance] = end
        work_s += took
        heappush(ends, (end, instance))
        latencies.append(end - now + after_s)
    fleet.work_s = work_s
    end_until(max(free_at))
    outstanding = sum(fleet.dispatcher.load(instance) for instance, is_there in enumerate(serves) if is_there)
    return len(trace.times) - len(latencies) + outstanding


def percentile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(share * len(rising)))]
