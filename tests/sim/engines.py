"""Make simulated contexts with an engine, and requests to these contexts."""

from __future__ import annotations

import random
from typing import Any

from sim.worlds import source, world

from stoker.contexts.step_times import StepSample, StepTimes, group_samples
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.world import ContextModel, EngineModel, World
from stoker.protocol.calls import Objective
from stoker.site import Duration, Size

LOADED_S = 10.0
"""Seconds until the context of the first call is loaded."""
SLINFER = Objective(ttft_s=0.5, ttft_per_token_s=1 / 512, ttft_most_s=8.0, tpot_s=0.25)
"""SLINFER's objective: min(max(0.5, length / 512), 8) s to the first token, 0.25 s per further token (§IV-A)."""


def step_times() -> StepTimes:
    """Step times: 1 ms to read a token; a decode step takes 10 ms plus 1 ms per request plus 1 us per cached token."""
    prefill = [StepSample(True, 2**power, 2**power / 2, 0.001 * 2**power) for power in range(12)]
    decode = [
        StepSample(False, rows, length, 0.01 + 0.001 * rows + 1e-6 * length * rows)
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for length in (8, 512, 4096)
    ]
    return group_samples([*prefill, *decode])


def engine(**more: Any) -> EngineModel:
    return EngineModel(step_times(), **{"rows": 64, **more})


def served(model: EngineModel | None = None, *, memory_gb: int = 8, **more: Any) -> ContextModel:
    """Return a context that loads in 10 s and whose engine sets the number of slots."""
    size = Size(memory_gb * 1_000_000_000)
    return ContextModel(
        device_memory_bytes=size, load_s={"": Duration(LOADED_S)}, engine={"": model or engine()},
        **{"slots": 0, **more},
    )  # fmt: skip


def one_world(context: ContextModel, blocks: Any = 1, **more: Any) -> World:
    return world(source(blocks, **more), context)


def requests(
    count: int, *, seed: int = 1, from_s: float = 20.0, every_s: float = 0.2, context: str = "llm",
    objective: Objective = SLINFER, prompt: int = 600, output: int = 80,
) -> list[Arrival]:  # fmt: skip
    chance, at, found = random.Random(seed), from_s, [Arrival(0.0, context, input_length=8, output=1)]
    for _ in range(count):
        at += chance.expovariate(1 / every_s)
        lengths = {"input_length": chance.randint(1, prompt), "output": chance.randint(1, output)}
        found.append(Arrival(round(at, 6), context, objective=objective, **lengths))
    return found
