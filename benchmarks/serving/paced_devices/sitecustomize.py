"""Stand-in for devices with processors of their own: each step of the `continuous` engine takes a fixed time, asleep.

Two cores that compute the models also run the gateway, the manager and the clients, so a measurement on them judges the
machine. With this folder on PYTHONPATH, a step computes a tiny model and then sleeps until the device would be done. A
file lock per device makes the steps of its libraries run one at a time. A pilot gives each `cpu:N` device a core, whose
number names the device.
"""

import fcntl
import importlib.abc
import importlib.util
import os
import sys
import tempfile
import time
from typing import Any

ENGINE = "stoker.contexts.inference.continuous"
PROMPT_S, PROMPT_TOKEN_S = 0.006, 0.0006
DECODE_S, ROW_S, CACHED_TOKEN_S = 0.008, 0.0012, 1e-6
"""Seconds of a step: constant and per token of prompts; constant, per decoding request, and per token in its cache."""


def step_s(*, prompt_tokens: int, rows: int, cached_tokens: int) -> float:
    prompts = PROMPT_S + PROMPT_TOKEN_S * prompt_tokens if prompt_tokens else 0.0
    return prompts + (DECODE_S + ROW_S * rows + CACHED_TOKEN_S * cached_tokens if rows else 0.0)


def pace(engine: Any) -> None:
    """Make each step of an engine class take `step_s`, and hold the device for that time."""
    compute = engine._compute

    def paced(self: Any, step: Any) -> tuple[Any, int]:
        name = f"paced-{min(os.sched_getaffinity(0))}"
        with open(os.path.join(os.environ.get("PACED_DEVICES") or tempfile.gettempdir(), name), "w") as device:
            fcntl.flock(device, fcntl.LOCK_EX)
            began = time.perf_counter()
            step, length = compute(self, step)
            over = began + step_s(
                prompt_tokens=step.prompt_tokens, rows=step.writing, cached_tokens=length * step.writing
            )
            time.sleep(max(0.0, over - time.perf_counter()))
        return step, length

    engine._compute = paced


class _PacedEngines(importlib.abc.MetaPathFinder):
    """Paces the engine when its module is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            pace(module.ContinuousEngine)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _PacedEngines())
