"""Event loop of the simulation. Instances answer in order, so the end of a request is known at dispatch."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

import msgspec

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.fleet import Agenda, Fleet
from benchmarks.papers.arlo.workload import Trace


class Served(msgspec.Struct):
    """Latencies in order of arrival. `lost`: requests without an instance, or open at the end."""

    latencies: list[float] = []
    lost: int = 0


def serve(trace: Trace, fleet: Fleet, agenda: Agenda, served: Served, *, occupies: bool = False) -> None:
    take, done = fleet.dispatcher.take, fleet.dispatcher.done
    rows, free_at, serves = fleet.rows, fleet.free_at, fleet.serves
    busy_s, after_s = (settings.OVERHEAD_S, 0.0) if occupies else (0.0, settings.OVERHEAD_S)
    latencies = served.latencies
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
        while ends[0][0] <= now:
            instance = heappop(ends)[1]
            if serves[instance]:
                done(instance)
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
    served.lost = len(trace.times) - len(latencies) + outstanding
