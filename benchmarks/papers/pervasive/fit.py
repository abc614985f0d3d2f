"""Fit parameter sets to Figures 6 and 7, with a fast closed form of the static runs.

In the closed form twenty workers take tasks of constant time from one queue. The simulator checks the sets.

Seven numbers do not determine ten unknowns. We draw many starts within the physical bounds, and improve each start
until every error is below a limit. Longer searches would end in one corner of the bounds. We keep the sets that are
farthest apart (Gonzalez, "Clustering to minimize the maximum intercluster distance", 1985). `CLOSE` is the rounding
error of the text (50 of 2,900 s); `FAIR` allows for chance in a single run on a shared cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from benchmarks.papers.pervasive import paper
from stoker.chance import Stream
from stoker.contexts.recipe import Awareness


class Parameters(msgspec.Struct, frozen=True):
    item_a10_s: float
    item_titan_s: float
    load_a10_s: float
    load_titan_s: float
    call_s: float
    shared_node_bytes_per_s: float
    network_bytes_per_s: float
    warm_items: float
    warm_item_s: float
    boot_s: float


class Bound(msgspec.Struct, frozen=True):
    low: float
    high: float
    why: str


_LOAD = "from cached imports and a fast disk to 3.7 GB at 20 MB/s from a spinning disk that workers share"
BOUNDS = {
    "item_a10_s": Bound(0.05, 1.5, "7.4 GB at 600 GB/s are 12 ms a token; an inference has 4 to 100"),
    "item_titan_s": Bound(0.05, 3.0, "7.4 GB at 480 GB/s are 15 ms a token; 1 to 6 times an A10's time"),
    "load_a10_s": Bound(5.0, 180.0, _LOAD),
    "load_titan_s": Bound(5.0, 180.0, _LOAD),
    "call_s": Bound(0.005, 0.5, "a task's overhead between manager and worker"),
    "shared_node_bytes_per_s": Bound(50e6, 1.25e9, "from 20 small files at a time to a full link of 10 Gb/s"),
    "network_bytes_per_s": Bound(0.125e9, 1.25e9, "between two nodes: links of 1 to 10 Gb/s"),
    "warm_items": Bound(1.0, 300.0, "at most until each kernel and length has run once"),
    "warm_item_s": Bound(0.0, 0.5, "from nothing to about an inference itself"),
    "boot_s": Bound(5.0, 60.0, "from the start of a batch job to a connected worker"),
}
MOST_SLOWER = 6.0
"""Maximum slowdown of a TITAN X compared with an A10; the minimum is 1."""


def is_possible(parameters: Parameters) -> bool:
    inside = all(bound.low <= getattr(parameters, name) <= bound.high for name, bound in BOUNDS.items())
    return inside and 1.0 <= parameters.item_titan_s / parameters.item_a10_s <= MOST_SLOWER


_EXACT_S = 1e-3


def static_run_s(parameters: Parameters, awareness: Awareness, batch: int) -> float:
    workers = [worker_times_s(parameters, kind, awareness, batch) for kind in (paper.A10, paper.TITAN)]
    return _makespan(paper.INFERENCES // batch, workers)


def worker_times_s(parameters: Parameters, kind: str, awareness: Awareness, batch: int) -> tuple[float, float]:
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
        begun = sum(paper.EACH * _begun_tasks(middle, begins, takes) for begins, takes in workers)
        low, high = (low, middle) if begun >= tasks else (middle, high)
    return max(begins + takes * _begun_tasks(high, begins, takes) for begins, takes in workers if high >= begins)


def _begun_tasks(at_s: float, begins: float, takes: float) -> int:
    return int((at_s - begins) / takes) + 1 if at_s >= begins else 0


def relative_errors(parameters: Parameters) -> dict[paper.Run, float]:
    return {run: run.error(static_run_s(parameters, run.awareness, run.batch)) for run in paper.RUNS}


CLOSE, FAIR = 0.02, 0.05
SEED = 0
_STEPS = 2500
_DRAWS = 10_000
_DIGITS = 4
_NAMES = tuple(BOUNDS)
_LEAST = 1e-3


class Fit(msgspec.Struct, frozen=True):
    """A parameter set, and its maximum relative error in closed form."""

    worst: float
    parameters: Parameters

    @property
    def close(self) -> bool:
        return self.worst <= CLOSE


def search(start: int) -> tuple[Fit, ...]:
    parameters, found = _draw_parameters(Stream(SEED, f"start/{start}")), []
    for limit in (FAIR, CLOSE):
        parameters = _improve_parameters(parameters, Stream(SEED, f"steps/{start}/{limit}"), limit=limit)
        rounded = Parameters(**{name: float(f"{getattr(parameters, name):.{_DIGITS}g}") for name in _NAMES})
        error = worst_error(rounded)
        if error <= limit and is_possible(rounded):
            found.append(Fit(error, rounded))
    return tuple(dict.fromkeys(found))


def choose_fits(found: Sequence[Fit], count: int) -> tuple[Fit, ...]:
    """Return `count` sets: the most central close set, then in turn the farthest close and the farthest fair set."""
    if not (close := [each for each in found if each.close]):
        return ()
    picked = [min(close, key=lambda each: sum(_distance(each, other) for other in close))]
    left = [each for each in found if each != picked[0]]
    while left and len(picked) < count:
        turn = [each for each in left if each.close is bool(len(picked) % 2)] or left
        picked.append(max(turn, key=lambda each: min(_distance(each, other) for other in picked)))
        left.remove(picked[-1])
    return tuple(picked)


def worst_error(parameters: Parameters) -> float:
    return max(map(abs, relative_errors(parameters).values()))


def _distance(one: Fit, other: Fit) -> float:
    total = 0.0
    for name, bound in BOUNDS.items():
        a, b = (max(getattr(each.parameters, name), _LEAST) for each in (one, other))
        total += (math.log(a / b) / math.log(bound.high / max(bound.low, _LEAST))) ** 2
    return math.sqrt(total)


def _draw_parameters(chance: Stream) -> Parameters:
    for attempt in range(_DRAWS):
        values = {}
        for number, (name, bound) in enumerate(BOUNDS.items()):
            low, high = max(bound.low, _LEAST), bound.high
            values[name] = low * (high / low) ** chance.uniform(attempt * len(BOUNDS) + number)
        parameters = Parameters(**values)
        if is_possible(parameters):
            return parameters
    raise ValueError("the bounds leave no room")


def _improve_parameters(parameters: Parameters, chance: Stream, *, limit: float) -> Parameters:
    value, size, number = _error_score(parameters), 0.3, 0
    for _ in range(_STEPS):
        if worst_error(parameters) <= limit:
            break
        one = int(chance.uniform(number) * 2 * len(_NAMES))
        changes = {}
        for place, name in enumerate(_NAMES):
            number += 1
            if one == place or one >= len(_NAMES):
                changes[name] = getattr(parameters, name) * math.exp(size * chance.normal(number))
        number += 1
        tried = msgspec.structs.replace(parameters, **changes)
        if is_possible(tried) and (score := _error_score(tried)) < value:
            parameters, value = tried, score
        size = max(0.003, size * 0.998)
    return parameters


def _error_score(parameters: Parameters) -> float:
    return sum(math.log1p(error) ** 2 for error in relative_errors(parameters).values())
