"""Limits the engines of CPU devices to a share of a core, so that models and other processes do not slow each other.

`gateway_objectives` puts this folder on PYTHONPATH. A step computes, then sleeps until its processor time is
`DEVICE_SHARE` of the time since its start. The kernel's own limits (`cpu.cfs_quota_us`) are too coarse: they follow the
clock tick of 4 ms, and a step also computes for 4 ms.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from typing import Any

ENGINE = "stoker.contexts.inference.continuous"


def limit(engine: Any, share: float) -> None:
    """Make each step of an engine class last its processor time divided by `share`."""
    compute = engine._compute_step

    def limited(self: Any, step: Any) -> Any:
        began, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return compute(self, step)
        finally:
            over = began + (time.thread_time() - cpu_s) / share
            time.sleep(max(0.0, over - time.perf_counter()))

    engine._compute_step = limited


class _LimitedEngines(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            limit(module.ContinuousEngine, float(os.environ["DEVICE_SHARE"]))

        spec.loader.exec_module = exec_module
        return spec


if "DEVICE_SHARE" in os.environ:
    sys.meta_path.insert(0, _LimitedEngines())
