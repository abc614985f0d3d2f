"""The tables and figures of SLINFER's evaluation as cases, by the names that `--table` takes.

Table II by hand: how many requests of one length an instance with a whole node serves at once.

The largest batch whose decode step is no longer than the time per output token, and whose weights and cache fit into
the 80 GiB of a GPU; a CPU has memory enough. What an engine needs besides is left out, so a GPU holds one or two more
here than in the paper.
"""

from __future__ import annotations

from itertools import product

from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, SLLM, SLLM_C, SLLM_CS, SLLM_CS_STATIC, Case
from benchmarks.papers.slinfer.data import OBJECTIVE
from benchmarks.papers.slinfer.paper import LOADS, SIZES
from benchmarks.papers.slinfer.worlds import GPU, ROWS, Nodes, profile_of
from stoker.contexts.step_times import StepSeconds

SYSTEMS = (*BASELINES, SLINFER)
MIXED = SIZES
ALLOCATING = (SLLM, SLLM_C, SLLM_CS, SLINFER)
BAR_RUN_S = 60.0
"""Of one core, for 128 models."""
QUICK_S = 300.0
"""A quick look takes so much of each workload."""

ABLATIONS: dict[str, dict[str, float | bool]] = {
    "whole": {},
    "without CPUs": {"cpus": False},
    "without sharing": {"sharing": False},
    "without consolidation": {"consolidation": False},
}
WATERMARKS = (0.0, 0.1, 0.25, 0.5, 1.0)
CPU_COUNTS = (0, 1, 2, 3, 4)
GPU_COUNTS = (3, 4)
"""Of Figure 24, beside two GPUs without a CPU."""
NODE_COUNTS = (1, 2, 3, 4)
DATASETS = ("AzureConv", "AzureCode", "HumanEval", "LongBench")

DOUBTS: dict[str, tuple[str, Nodes, dict[str, float | bool]]] = {
    "CPUs load as GPUs do": (SLLM_CS, Nodes(cpu_loads=True), {}),
    "loads take twice as long": (SLLM_CS, Nodes(load_bytes_per_s=6.3e9), {}),
    "CPU nodes have 256 GB": (SLLM_CS, Nodes(cpu_memory_bytes=256_000_000_000), {}),
    "nothing is dropped": (SLLM_CS, Nodes(), {"drops": False}),
    "instances leave at once": (SLLM_CS, Nodes(), {"keep_alive_s": 0.0}),
    "instances stay 10 s": (SLLM_CS, Nodes(), {"keep_alive_s": 10.0}),
    "half a node computes at half its speed": (SLLM_CS_STATIC, Nodes(), {}),
}
"""What the text leaves open of `sllm+c+s`, and one experiment for each."""


LARGER_CPUS = Nodes(cpu_memory_bytes=256_000_000_000)
"""As in the authors' program."""
ALLOCATES = Nodes(cache_s_per_gb=0.03)
"""A load allocates the cache of its instance: 1.9 s for 64 GB (Figure 17). One of `sllm` has all of a GPU, one of
`slinfer` begins with a cache for 4,096 tokens."""


def _grid(systems: tuple[str, ...], sizes: tuple[str, ...]) -> list[Case]:
    return [Case(system, models, (size,)) for size, models, system in product(sizes, LOADS, systems)]


def _table_23() -> list[Case]:
    return [Case(SLINFER, 64, settings=settings) for settings in ABLATIONS.values()]


def _table_24() -> list[Case]:
    by_cpus = [Case(SLINFER, 64, nodes=Nodes(gpus=2, cpus=cpus)) for cpus in CPU_COUNTS]
    return [*by_cpus, *(Case(SLINFER, 64, nodes=Nodes(gpus=gpus, cpus=0)) for gpus in GPU_COUNTS)]


def _table_25() -> list[Case]:
    return [Case(system, 64, MIXED) for system in (SLLM, SLLM_C, SLLM_CS, SLINFER)]


def _table_31() -> list[Case]:
    return [Case(SLINFER, 64, settings={"watermark": watermark}) for watermark in WATERMARKS]


def _table_32() -> list[Case]:
    nodes = [Nodes(gpus=count, cpus=count) for count in NODE_COUNTS]
    return [Case(system, 64, nodes=each) for each in nodes for system in (SLLM_C, SLLM_CS, SLINFER)]


def _table_35() -> list[Case]:
    return [Case(system, 64, ("llama-3.1-8b",), name) for name in DATASETS for system in (SLLM_CS, SLINFER)]


def doubts() -> list[Case]:
    alone = [
        Case(system, models, nodes=nodes, settings=settings)
        for system, nodes, settings in DOUBTS.values() for models in LOADS
    ]  # fmt: skip
    allocating = [Case(system, 128, (size,), nodes=ALLOCATES) for size in SIZES for system in ALLOCATING]
    return [*alone, *allocating, *(Case(SLINFER, 128, (size,), nodes=LARGER_CPUS) for size in SIZES)]


TABLES = {
    "22": lambda: _grid(SYSTEMS, SIZES),
    "III": lambda: _grid((SLLM_CS, SLLM_CS_STATIC, SLINFER), ("llama-2-7b",)),
    "128": lambda: [Case(system, 128, (size,)) for size in SIZES for system in SYSTEMS],
    "23": _table_23,
    "24": _table_24,
    "25": _table_25,
    "31": _table_31,
    "32": _table_32,
    "35": _table_35,
    "II": list[Case],
    "doubts": doubts,
}
"""What has to be run for each table; `II` is computed from the profile alone."""


_MEMORY_BYTES = 80 * 2**30
_GIB = 2**30 / 1e9
"""The authors' file gives weights in GiB; `data` reads them as GB."""


def concurrency(kind: str, size: str, length: int) -> int:
    profile = profile_of(size, kind)
    seconds = StepSeconds(profile.times)
    fits = ROWS
    if kind == GPU:
        fits = int((_MEMORY_BYTES - profile.weights_bytes * _GIB) // (profile.token_bytes * length))
    in_time = (rows for rows in range(ROWS, 0, -1) if seconds.decode_s(rows, length)[0] <= OBJECTIVE.tpot_s)
    return min(fits, next(in_time, 0))
