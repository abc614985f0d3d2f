"""The static runs in closed form: quick enough to search for parameters with. The simulator checks what is found.

Twenty workers pull tasks from one queue; each task takes a constant time on a kind of GPU. Whoever is free first takes
the next, so the last task begins at the first moment by which as many have begun as there are. What the simulator adds:
the manager's decisions, transfers, and messages.
"""

from __future__ import annotations

from benchmarks.papers.pervasive import paper
from benchmarks.papers.pervasive.parameters import Parameters
from stoker.contexts.recipe import Awareness

_EXACT_S = 1e-3


def seconds(parameters: Parameters, awareness: Awareness, batch: int) -> float:
    """How long a run takes."""
    workers = [worker(parameters, kind, awareness, batch) for kind in (paper.A10, paper.TITAN)]
    return _makespan(paper.INFERENCES // batch, workers)


def worker(parameters: Parameters, kind: str, awareness: Awareness, batch: int) -> tuple[float, float]:
    """When a worker of a kind begins its first task, and how long each takes, in seconds."""
    p = parameters
    item_s, load_s = (p.item_a10_s, p.load_a10_s) if kind == paper.A10 else (p.item_titan_s, p.load_titan_s)
    rate = min(p.shared_node_bytes_per_s, p.network_bytes_per_s)
    copy_s = (paper.MODEL_BYTES + paper.ENVIRONMENT_BYTES) / rate
    run_s = p.call_s + batch * item_s
    if awareness is Awareness.FULL:
        return p.boot_s + copy_s + load_s + int(p.warm_items) * p.warm_item_s, run_s
    task_s = load_s + run_s + min(batch, int(p.warm_items)) * p.warm_item_s
    if awareness is Awareness.DISK:
        return p.boot_s + copy_s, task_s
    return p.boot_s, task_s + copy_s


def _makespan(tasks: int, workers: list[tuple[float, float]]) -> float:
    low = min(begins for begins, _ in workers)
    high = max(begins for begins, _ in workers) + tasks * max(takes for _, takes in workers)
    while high - low > _EXACT_S:
        middle = (low + high) / 2
        begun = sum(paper.EACH * _begun(middle, begins, takes) for begins, takes in workers)
        low, high = (low, middle) if begun >= tasks else (middle, high)
    ends = (begins + takes * _begun(high, begins, takes) for begins, takes in workers if high >= begins)
    return max(ends)


def _begun(at_s: float, begins: float, takes: float) -> int:
    """Tasks that a worker has begun until then."""
    return int((at_s - begins) / takes) + 1 if at_s >= begins else 0


def errors(parameters: Parameters) -> dict[paper.Run, float]:
    """Relative errors of all runs."""
    return {run: run.error(seconds(parameters, run.awareness, run.batch)) for run in paper.RUNS}
