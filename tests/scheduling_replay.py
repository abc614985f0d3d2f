"""A second, short implementation of SchedMate's scheduling policies as event loops over jobs, without manager, pilots
or messages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from benchmarks.papers.schedmate.scheduling.simulate import Job


def in_order(jobs: Sequence[Job], *, gpus: int, keys: Sequence[float], skip: bool = False) -> list[float]:
    """Return completion times of jobs in order of keys, then arrival. `skip`: later jobs may overtake a job that does
    not fit.
    """
    ends: list[tuple[float, int]] = []
    line: list[tuple[float, int]] = []
    took, coming, free, now = [0.0] * len(jobs), 0, gpus, 0.0
    while coming < len(jobs) or ends:
        now = min(jobs[coming].at_s if coming < len(jobs) else math.inf, ends[0][0] if ends else math.inf)
        while ends and ends[0][0] <= now:
            free += jobs[heapq.heappop(ends)[1]].gpus
        while coming < len(jobs) and jobs[coming].at_s <= now:
            line.append((keys[coming], coming))
            coming += 1
        for key, number in sorted(line):
            job = jobs[number]
            if job.gpus <= free:
                free -= job.gpus
                line.remove((key, number))
                took[number] = now + job.duration_s - job.at_s
                heapq.heappush(ends, (now + job.duration_s, number))
            elif not skip:
                break
    return took


def least_attained(
    jobs: Sequence[Job], *, gpus: int, thresholds: Sequence[float], restart_s: tuple[float, float]
) -> tuple[list[float], int]:
    left = [job.duration_s for job in jobs]
    had = [0.0] * len(jobs)
    took, present, running = [0.0] * len(jobs), list[int](), set[int]()
    seen: set[int] = set()
    coming, preempted, now = 0, 0, 0.0
    while coming < len(jobs) or present:
        moments = [jobs[coming].at_s] if coming < len(jobs) else []
        for number in running:
            moments.append(now + left[number])
            moments += [
                now + (each - had[number]) / jobs[number].gpus for each in thresholds if each > had[number] + 1e-6
            ]
        then = min(moments)
        for number in running:
            left[number] -= then - now
            had[number] += (then - now) * jobs[number].gpus
        now = then
        for number in [number for number in running if left[number] <= 1e-6]:
            took[number] = now - jobs[number].at_s
            running.discard(number)
            present.remove(number)
        while coming < len(jobs) and jobs[coming].at_s <= now:
            present.append(coming)
            coming += 1
        free, chosen = gpus, set[int]()
        for number in sorted(present, key=lambda each: (sum(had[each] >= t - 1e-6 for t in thresholds), each)):
            if jobs[number].gpus <= free:
                free -= jobs[number].gpus
                chosen.add(number)
        for number in running - chosen:
            left[number] += restart_s[jobs[number].gpus > 8]
            preempted += 1
        running = chosen
        seen |= chosen
    return took, preempted
