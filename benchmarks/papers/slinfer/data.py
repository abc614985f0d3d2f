"""Read data of SLINFER's authors (github.com/BarrinXu/SLINFER): workloads and a latency profile (§VI-B).

The files are in `../shared/data/slinfer` (`missing`). A workload has 128 functions in groups of eight by call rate.
Smaller workloads use the first functions of each group, like the authors' program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.papers import common
from stoker.contexts.step_times import StepCell, StepTimes
from stoker.manager.sim.client import Arrival
from stoker.protocol.calls import Objective

DATA = common.DATA / "slinfer"
OBJECTIVE = Objective(ttft_s=0.5, ttft_per_token_s=1 / 512, ttft_most_s=8.0, tpot_s=0.25)
"""Objective: min(max(0.5, L / 512), 8) s to the first token, 0.25 s for each further token (§IX-A)."""


GROUP = 8
"""Number of functions per group of similar call rate."""


class ModelProfile(msgspec.Struct, frozen=True):
    """A model on one kind of device. `limit`, `shared_limit`: maximum concurrent requests of an instance under the
    baselines, on a whole and on half a device; 0 = unknown.
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
        times=times_of(latency),
        weights_bytes=round(memory["weights_gb"] * 1e9),
        token_bytes=memory["kv_kb_per_token"] * 1024,
        limit=latency["sllm_concurrency"] or 0,
        shared_limit=shared.get("2") or 0,
    )


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
