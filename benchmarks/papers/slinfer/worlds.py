"""Read the data of SLINFER's authors, and build its nodes (§IX-A) with language models as contexts.

The authors published workloads and a latency profile (github.com/BarrinXu/SLINFER, §VI-B); the files are in
`../shared/data/slinfer` (`missing`). A workload has 128 functions in groups of eight by call rate. Smaller workloads
use the first functions of each group, like the authors' program.

Four nodes have an A100 of 80 GB, and four nodes have 32 cores with AMX. A GPU load transfers 12.6 GB/s. Details
missing in the paper follow the authors' program: CPU loads take no time, and a CPU node has the memory of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.papers import common
from stoker.contexts.step_times import StepCell, StepTimes
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, EngineModel, World
from stoker.protocol.calls import Objective
from stoker.site import Duration, Size

DATA = common.DATA / "slinfer"
OBJECTIVE = Objective(ttft_s=0.5, ttft_per_token_s=1 / 512, ttft_most_s=8.0, tpot_s=0.25)
"""Objective: min(max(0.5, L / 512), 8) s to the first token, 0.25 s for each further token (§IX-A)."""


GROUP = 8
"""Number of functions per group of similar call rate."""


class ModelProfile(msgspec.Struct, frozen=True):
    """A model on one kind of device. `limit`, `shared_limit`: maximum concurrent requests of an instance in the
    baselines, on a whole device and on half a device; 0 = unknown.
    """

    times: StepTimes
    weights_bytes: int
    token_bytes: int
    limit: int
    shared_limit: int


def missing() -> str:
    return common.missing(DATA / "latency_profile.json", "the data of SLINFER's authors is")


def read_profile(model: str, device: str) -> ModelProfile:
    data = msgspec.json.decode((DATA / "latency_profile.json").read_bytes())
    memory, latency = data["memory"][model], data["latency"][model][device]
    shared = latency["sllm_share_concurrency"] or {}
    return ModelProfile(
        times_of(latency), weights_bytes=round(memory["weights_gb"] * 1e9),
        token_bytes=memory["kv_kb_per_token"] * 1024, limit=latency["sllm_concurrency"] or 0,
        shared_limit=shared.get("2") or 0,
    )  # fmt: skip


def times_of(latency: dict[str, Any]) -> StepTimes:
    prefill = tuple(StepCell(tokens, tokens / 2, ms / 1000) for tokens, ms in latency["prefill_ms"])
    decode = tuple(
        StepCell(batch, of_length["tokens"], ms / 1000)
        for of_length in latency["decode_ms"]
        for batch, ms in of_length["by_batch"]
    )
    return StepTimes(prefill, decode)


class _Function(msgspec.Struct, frozen=True):
    timestamps: tuple[float, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]


def read_workload(
    name: str, models: int, *, objective: Objective = OBJECTIVE, for_s: float = 0.0
) -> list[Arrival]:  # fmt: skip
    """Return requests to this number of models (`model-0`, ...) in `for_s` seconds (0 = all)."""
    path = Path(DATA / f"{name}.json")
    functions = msgspec.json.decode(path.read_bytes(), type=list[_Function])
    if not 1 <= models <= len(functions):
        raise ValueError(f"{name} has {len(functions)} functions, not {models}")
    of_group = -(-models * GROUP // len(functions))
    sample = [function for place, function in enumerate(functions) if place % GROUP < of_group][:models]
    found = [
        Arrival(at_s, f"model-{number}", input_length=prompt, output=output, objective=objective)
        for number, function in enumerate(sample)
        for at_s, prompt, output in zip(function.timestamps, function.input, function.output, strict=True)
        if not for_s or at_s < for_s
    ]
    return sorted(found, key=lambda arrival: arrival.at_s)


NODES = 4
GPU, CPU = "gpu", "cpu"
KINDS = (CPU, GPU)
"""Kinds of devices, best first (§IX-A)."""
MEMORY_BYTES = 80_000_000_000
LOAD_BYTES_PER_S = 12.6e9
LONGEST_PROMPT = 32_768
"""Maximum tokens of a step, enough for each prompt (§V)."""
PAGE_TOKENS = 16
MOST_OUTPUT = 2048
ROWS = 256
"""Largest profiled batch (§VI-B)."""
RESIZE_S_PER_GB = 0.03
"""Seconds per GB to allocate a new cache (Figure 17)."""


class Nodes(msgspec.Struct, frozen=True):
    """`parts`: devices per node (except `WHOLE_ON_CPU`). `cache_s_per_gb`: seconds that a GPU load takes per GB of
    cache. `resize_s_per_gb`: seconds that a resize takes per GB of cache.
    """

    gpus: int = NODES
    cpus: int = NODES
    parts: int = 1
    gpu_memory_bytes: int = MEMORY_BYTES
    cpu_memory_bytes: int = MEMORY_BYTES
    cache_s_per_gb: float = 0.0
    resize_s_per_gb: float = RESIZE_S_PER_GB

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind, count in ((CPU, self.cpus), (GPU, self.gpus)) if count)


WHOLE_ON_CPU = frozenset({"llama-2-13b"})
"""Models that always get a whole CPU node (§IX-A)."""


def profile_of(size: str, kind: str) -> ModelProfile:
    return read_profile(size, f"{kind}:{kind}")


def parts_of(size: str, kind: str, parts: int) -> int:
    return 1 if kind == CPU and size in WHOLE_ON_CPU else parts


def limit_of(size: str, kind: str, parts: int) -> int:
    profile = profile_of(size, kind)
    return profile.shared_limit if parts > 1 else profile.limit


def engine_of(size: str, kind: str, *, rows: int) -> EngineModel:
    profile = profile_of(size, kind)
    return EngineModel(
        profile.times, rows=rows, prefill_tokens=LONGEST_PROMPT, prefill_requests=1,
        token_bytes=Size(profile.token_bytes), weights_bytes=Size(profile.weights_bytes), most_output=MOST_OUTPUT,
        page_tokens=PAGE_TOKENS,
    )  # fmt: skip


def limited_world(sizes: list[str], nodes: Nodes, *, share: int = 1) -> World:
    if len({parts_of(size, CPU, nodes.parts) for size in sizes}) > 1:
        raise ValueError("sizes of which some have a whole CPU node and others a part of one: let them share it")
    together = max(share, nodes.parts)
    least_bytes = min(nodes.gpu_memory_bytes, nodes.cpu_memory_bytes)
    models = {
        size: ContextModel(
            device_memory_bytes=Size(least_bytes // together), kinds=nodes.kinds, slots=0,
            load_s=_load_s(size, nodes, memory_bytes=nodes.gpu_memory_bytes // together),
            engine={kind: engine_of(size, kind, rows=limit_of(size, kind, together)) for kind in nodes.kinds},
        )
        for size in set(sizes)
    }  # fmt: skip
    return _world([models[size] for size in sizes], nodes, parts_of(sizes[0], CPU, nodes.parts))


def elastic_world(sizes: list[str], nodes: Nodes, *, longest: int = 4096) -> World:
    """Return models whose cache first has room for `longest` tokens."""
    models = {}
    for size in set(sizes):
        profile = profile_of(size, nodes.kinds[-1])
        memory_bytes = profile.weights_bytes + longest * profile.token_bytes
        models[size] = ContextModel(
            device_memory_bytes=Size(memory_bytes), kinds=nodes.kinds, slots=0,
            load_s=_load_s(size, nodes, memory_bytes=memory_bytes), resize_s=Duration(nodes.resize_s_per_gb),
            engine={kind: engine_of(size, kind, rows=ROWS) for kind in nodes.kinds},
        )  # fmt: skip
    return _world([models[size] for size in sizes], nodes, 1)


def _load_s(size: str, nodes: Nodes, *, memory_bytes: int) -> dict[str, Duration]:
    allocates = nodes.cache_s_per_gb * (memory_bytes - profile_of(size, GPU).weights_bytes) / 1e9
    return {GPU: Duration(weights_load_s(size) + allocates), CPU: Duration(0.0)}


def weights_load_s(size: str) -> float:
    return profile_of(size, GPU).weights_bytes / LOAD_BYTES_PER_S


def _world(models: list[ContextModel], nodes: Nodes, cpu_parts: int) -> World:
    parts = {GPU: nodes.parts, CPU: cpu_parts}
    memory = {GPU: nodes.gpu_memory_bytes, CPU: nodes.cpu_memory_bytes}
    counts = {kind: {CPU: nodes.cpus, GPU: nodes.gpus}[kind] for kind in nodes.kinds}
    return World(
        devices={kind: DeviceKind(Size(memory[kind] // parts[kind]), speed=1 / parts[kind]) for kind in nodes.kinds},
        sources=tuple(common.fixed_source(kind, kind, n, devices=parts[kind]) for kind, n in counts.items()),
        contexts={f"model-{number}": model for number, model in enumerate(models)},
        delays=Delays(message_s=Duration(0.0005)),
    )
