"""SLINFER's tables and figures as cases, and the numbers of its text (arXiv:2507.00507)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

from benchmarks.papers.slinfer import authors
from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, SLLM, SLLM_C, SLLM_CS, SLLM_CS_STATIC, Case
from benchmarks.papers.slinfer.worlds import CPU, GPU, OBJECTIVE, ROWS, Nodes, profile_of
from stoker.contexts.step_times import StepSeconds

SMALL, SEVEN, LARGE = SIZES = ("llama-3.2-3b", "llama-2-7b", "llama-2-13b")
SHORT = {SMALL: "3B", SEVEN: "7B", LARGE: "13B", "llama-3.1-8b": "8B"}
LOADS = (32, 64, 128)
NODES_USED: dict[tuple[str, int, str, str], float] = {  # Figure 22 and Table III, by size, models, system and kind
    (SMALL, 32, SLINFER, GPU): 0.0,
    (SMALL, 32, SLINFER, CPU): 3.0,
    (SMALL, 32, SLLM, GPU): 3.2,
    (SEVEN, 32, SLLM_C, GPU): 1.5,
    **{(SEVEN, models, SLLM_CS, GPU): nodes for models, nodes in zip(LOADS, (2.0, 3.6, 4.0), strict=True)},
    **{(SEVEN, models, SLINFER, GPU): nodes for models, nodes in zip(LOADS, (0.9, 2.5, 4.0), strict=True)},
    **{(LARGE, 128, system, GPU): 4.0 for system in (SLLM, SLLM_C, SLLM_CS, SLINFER)},
}
MET: dict[tuple[str, int, str], float] = {  # Table III: percent of requests, with prefill and decode in one instance
    **{(SEVEN, models, SLLM_CS): met for models, met in zip(LOADS, (99.0, 93.0, 65.0), strict=True)},
    **{(SEVEN, models, SLINFER): met for models, met in zip(LOADS, (99.0, 99.0, 86.0), strict=True)},
}
MORE_MET = {SLLM: (86.0, 154.0), SLLM_C: (47.0, 62.0), SLLM_CS: (18.0, 70.0)}
"""Percent by which SLINFER meets more objectives at 128 models: minimum and maximum over sizes (§IX-B)."""
TABLE_II = {  # maximum concurrent requests of an instance on a whole node
    (CPU, SEVEN, 2048): 27, (CPU, SEVEN, 4096): 15, (GPU, SEVEN, 2048): 66, (GPU, SEVEN, 4096): 32,
    (GPU, LARGE, 2048): 33, (GPU, LARGE, 4096): 16,
}  # fmt: skip
RESIZING = {0.0: 11.3, 0.25: 1.4}
"""Percent of instance lifetime spent on resizing, by watermark (§IX-I5)."""
BAR_POINTS, BAR_GPUS, BAR_FACTOR, BAR_RUN_S = 4.0, 0.4, 2.0, 60.0
"""Allowed differences from the paper (points, GPUs, factor), and seconds of one core for 128 models."""

SYSTEMS = (*BASELINES, SLINFER)
QUICK_S = 300.0
ABLATIONS: dict[str, dict[str, float | bool]] = {
    "whole": {}, "without CPUs": {"cpus": False}, "without sharing": {"sharing": False},
    "without consolidation": {"consolidation": False},
}  # fmt: skip
ABLATED = [(64, name) for name in ABLATIONS] + [(128, "whole"), (128, "without consolidation")]
WATERMARKS = (0.0, 0.1, 0.25, 0.5, 1.0)
RESIZE_READINGS = [(0.03, 4096), (0.03, 1024), (0.06, 4096), (0.06, 1024), (0.12, 4096)]
"""Assumptions about resizes: seconds per GB of a new cache, and tokens of the smallest cache (eq. 2)."""
NODES_24 = [Nodes(gpus=2, cpus=cpus) for cpus in range(5)] + [Nodes(gpus=gpus, cpus=0) for gpus in (3, 4)]
NODES_32 = [Nodes(gpus=count, cpus=count) for count in range(1, 5)]
DATASETS = ("AzureConv", "AzureCode", "HumanEval", "LongBench")
BURSTS = (0.5, 1, 2)
"""Requests per second of the workloads of Figure 27 (10 minutes each). The data lack the workload with 4 requests per
second.
"""
BURST_S = 600.0
KEEP_ALIVES_S = (0.0, 1.0, 4.0, 10.0)
PROGRAM_SYSTEMS = (SLLM, SLLM_C, SLLM_CS_STATIC, SLINFER)
"""Systems in the authors' program. There, an instance of `sllm+c+s` sleeps after each computation for the time of the
computation.
"""


def _grid(systems: Iterable[str], sizes: Iterable[str], loads: Iterable[int] = LOADS) -> list[Case]:
    return [Case(system, models, (size,)) for size, models, system in product(sizes, loads, systems)]


def burst_case(system: str, per_s: float) -> Case:
    return Case(system, 64, workload=f"BurstGPT{per_s:g}", for_s=BURST_S)


def ablated_case(models: int, name: str) -> Case:
    return Case(SLINFER, models, settings=ABLATIONS[name])


def keep_alive_case(system: str, seconds: float) -> Case:
    return Case(system, 64, settings={} if seconds == 1.0 else {"keep_alive_s": seconds})


def resize_case(watermark: float, seconds: float, longest: int) -> Case:
    nodes = Nodes(resize_s_per_gb=seconds)
    return Case(SLINFER, 64, nodes=nodes, settings={"watermark": watermark}, longest=0 if longest == 4096 else longest)


def program_case(system: str, size: str, *, without: str = "") -> Case:
    """Return a case of 128 models in the variant "authors' program", without one row. Baselines have no row *caps*."""
    without = "" if without == "caps" and system != SLINFER else without
    return Case(system, 128, (size,), program=tuple(row for row in authors.ROWS if row != without))


TABLES: dict[str, Callable[[], list[Case]]] = {
    "22": lambda: _grid(SYSTEMS, SIZES),
    "III": lambda: _grid((SLLM_CS, SLLM_CS_STATIC, SLINFER), (SEVEN,)),
    "128": lambda: _grid(SYSTEMS, SIZES, (128,)),
    "23": lambda: [ablated_case(*each) for each in ABLATED],
    "24": lambda: [Case(SLINFER, 64, nodes=nodes) for nodes in NODES_24],
    "25": lambda: [Case(system, 64, SIZES) for system in (SLLM, SLLM_C, SLLM_CS, SLINFER)],
    "27": lambda: [burst_case(system, per_s) for per_s in BURSTS for system in (SLLM, SLLM_C, SLLM_CS, SLINFER)],
    "30": lambda: [keep_alive_case(*each) for each in product((SLLM_C, SLLM_CS, SLINFER), KEEP_ALIVES_S)],
    "31": lambda: [Case(SLINFER, 64, settings={"watermark": watermark}) for watermark in WATERMARKS],
    "resizes": lambda: [resize_case(watermark, *each) for each in RESIZE_READINGS for watermark in RESIZING],
    "32": lambda: [Case(system, 64, nodes=each) for each in NODES_32 for system in (SLLM_C, SLLM_CS, SLINFER)],
    "35": lambda: [Case(system, 64, ("llama-3.1-8b",), name) for name in DATASETS for system in (SLLM_CS, SLINFER)],
    "II": list,
    "program": lambda: [program_case(system, size) for size in SIZES for system in PROGRAM_SYSTEMS],
    "rows": lambda: [
        program_case(SLLM, SMALL, without="cache"),
        *(
            program_case(system, SEVEN, without=row)
            for row in authors.ROWS for system in (PROGRAM_SYSTEMS if row != "caps" else (SLINFER,))
        ),
    ],
}  # fmt: skip
"""The cases of each table; `II` is computed from the profile alone."""

_MEMORY_BYTES, _GIB = 80 * 2**30, 2**30 / 1e9
"""Memory of a GPU. `data` reads the authors' GiB as GB."""


def concurrency(kind: str, size: str, length: int) -> int:
    """Return the largest batch of Table II that fits and meets the decode objective."""
    profile = profile_of(size, kind)
    seconds, fits = StepSeconds(profile.times), ROWS
    if kind == GPU:
        fits = int((_MEMORY_BYTES - profile.weights_bytes * _GIB) // (profile.token_bytes * length))
    in_time = (rows for rows in range(ROWS, 0, -1) if seconds.decode_s(rows, length)[0] <= OBJECTIVE.tpot_s)
    return min(fits, next(in_time, 0))
