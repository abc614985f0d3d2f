"""The six static runs in closed form: quick enough to search for parameters with. The simulator checks what is found.

Twenty workers pull tasks from one queue; each task takes a constant time on a kind of GPU. What the simulator adds: the
manager's decisions, transfers, and messages.
"""

from __future__ import annotations

import heapq
import math

from stoker.contexts.recipe import Awareness
from stoker.manager.study.reproduce import paper
from stoker.manager.study.reproduce.parameters import Parameters

_MANY = 20_000


def seconds(parameters: Parameters, awareness: Awareness, batch: int) -> float:
    """How long a run takes."""
    each = [_worker(parameters, kind, awareness, batch) for kind in (paper.A10, paper.TITAN)]
    workers = [worker for worker in each for _ in range(paper.EACH)]
    return _makespan(paper.INFERENCES // batch, workers)


def _worker(parameters: Parameters, kind: str, awareness: Awareness, batch: int) -> tuple[float, float]:
    """When a worker begins its first task, and how long each takes."""
    p = parameters
    item_s, load_s = (p.item_a10_s, p.load_a10_s) if kind == paper.A10 else (p.item_titan_s, p.load_titan_s)
    copy_s = (paper.MODEL_BYTES + paper.ENVIRONMENT_BYTES) / p.shared_node_bytes_per_s
    run_s = p.call_s + batch * item_s
    if awareness is Awareness.FULL:
        return p.boot_s + copy_s + load_s + int(p.warm_items) * p.warm_item_s, run_s
    task_s = load_s + run_s + min(batch, int(p.warm_items)) * p.warm_item_s
    if awareness is Awareness.DISK:
        return p.boot_s + copy_s, task_s
    return p.boot_s, task_s + copy_s


def _makespan(tasks: int, workers: list[tuple[float, float]]) -> float:
    if tasks > _MANY:
        low, high = 0.0, 1e8
        while high - low > 1e-3:
            middle = (low + high) / 2
            done = sum(max(0, math.floor((middle - begins) / takes)) for begins, takes in workers)
            low, high = (low, middle) if done >= tasks else (middle, high)
        return high
    heap = [(begins, number) for number, (begins, _) in enumerate(workers)]
    heapq.heapify(heap)
    end = 0.0
    for _ in range(tasks):
        free_at, number = heapq.heappop(heap)
        free_at += workers[number][1]
        end = max(end, free_at)
        heapq.heappush(heap, (free_at, number))
    return end


def errors(parameters: Parameters) -> dict[paper.Run, float]:
    """Relative errors of all six."""
    return {run: seconds(parameters, run.awareness, run.batch) / run.seconds - 1.0 for run in paper.RUNS}
