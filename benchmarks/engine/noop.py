"""Compare no-op calls on a loaded context: Stoker against Parsl's HighThroughputExecutor, alternating, 2 slots each.

Stoker runs the garbage collector less often in a session; lines show results with and without this change.

`python -m benchmarks.engine.noop stoker app --calls 10000` runs one side alone.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider

import stoker
from benchmarks.harness import in_turns, run_side
from benchmarks.starting import print_side
from benchmarks.tables import Bar, Table, versus

NAME, TITLE = "noop", "no-op calls on a hot context against Parsl's HighThroughputExecutor (HTEX)"
SIDE = "benchmarks.engine.noop"
AHEAD = 1000
"""Number of tasks that HTEX prefetches in one line."""


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pairs, calls = (1, 300) if quick else (5, 10_000)
    ways: dict[str, tuple[str, ...]] = {
        "app": (), "seq": (), "app_both": ("--collector", "calm"), "app_neither": ("--collector", "usual"),
        "log": ("--log",),
    }  # fmt: skip
    sides = {
        f"{prefix}{name}": partial(_side, executor, "sequential" if name == "seq" else "app", calls, *way)
        for prefix, executor in (("", "stoker"), ("htex_", "htex"))
        for name, way in ways.items()
    }
    sides["htex_ahead"] = partial(_side, "htex", "app", calls, "--collector", "calm", "--prefetch", str(AHEAD))
    sides["map"] = partial(_side, "stoker", "map", 10 * calls)
    found = in_turns(sides, pairs, say)
    lines = []
    for what, ours, theirs, digits, bar in (
        ("python_app, calls/s", "app", "htex_app", 0, Bar(at_least=4)),
        ("stoker.map with batch_size=1, calls/s, against HTEX's python_app", "map", "htex_app", 0, Bar(at_least=25)),
        ("python_app, one after another, p50 in ms", "seq", "htex_seq", 2, Bar(at_most=0.6)),
        ("python_app, calls/s, the collector calm on both sides", "app_both", "htex_app_both", 0, None),
        ("python_app, calls/s, the collector as usual on both sides", "app_neither", "htex_app_neither", 0, None),
        (f"the same, calm, and HTEX fetches {AHEAD:,} ahead", "app_both", "htex_ahead", 0, None),
        ("python_app with Parsl's default logging, calls/s", "log", "htex_log", 0, None),
    ):
        lines.append(versus(what, {"Stoker": found[ours], "HTEX": found[theirs]}, bar=bar, digits=digits))
    return Table(name=NAME, title=TITLE, lines=lines)


def _side(executor: str, how: str, calls: int, *more: str) -> float:
    found = run_side(SIDE, executor, how, "--calls", str(calls), *more)
    return float(found["p50_ms" if how == "sequential" else "calls_per_s"])


def nothing(x: int) -> int:
    return x


def side(
    executor: Literal["stoker", "htex"], how: Literal["app", "sequential", "map"], calls: int = 10_000,
    log: bool = False, prefetch: int = 0, collector: str = "own", site: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Run calls. `log`: with Parsl's default logging; `prefetch`: tasks that HTEX fetches ahead of need; `collector`:
    garbage collector, the executor's `own`, Stoker's (`calm`) or Python's (`usual`); `site`: site file for Stoker.
    """
    if executor == "stoker":
        used: Any = stoker.StokerExecutor(site=site or None, label="noop")
    else:
        local = LocalProvider(init_blocks=1, max_blocks=1)
        used = HighThroughputExecutor(label="noop", max_workers_per_node=2, prefetch_capacity=prefetch, provider=local)
    with tempfile.TemporaryDirectory(prefix="noop-", ignore_cleanup_errors=True) as folder:
        return timed(used, how, calls, folder=folder, log=log, collector=collector)


def timed(executor: Any, how: str, calls: int, *, folder: str, log: bool, collector: str) -> dict[str, Any]:
    config = Config(executors=[executor], run_dir=folder, initialize_logging=log, usage_tracking=0, strategy="none")
    usual = gc.get_threshold()
    with parsl.load(config):
        if collector == "calm":
            from stoker.manager.executor.executor import GC_THRESHOLDS

            gc.set_threshold(*GC_THRESHOLDS)
        elif collector == "usual":
            gc.set_threshold(*usual)
        app = parsl.python_app(nothing)
        warm = [app(i) for i in range(200)]
        assert [future.result() for future in warm] == list(range(200))
        if how == "sequential":
            times = []
            for i in range(min(calls, 2000)):
                start = time.perf_counter()
                app(i).result()
                times.append(time.perf_counter() - start)
            times.sort()
            return {"p50_ms": 1e3 * statistics.median(times), "p99_ms": 1e3 * times[int(0.99 * len(times))]}
        if how == "map":
            mapped = stoker.app()(nothing)
            assert list(stoker.map(mapped, range(200), batch_size=1)) == [[i] for i in range(200)]
            start = time.perf_counter()
            results = [one for [one] in stoker.map(mapped, range(calls), batch_size=1)]
        else:
            start = time.perf_counter()
            results = [future.result() for future in [app(i) for i in range(calls)]]
        seconds = time.perf_counter() - start
        assert results == list(range(calls))
        return {"calls_per_s": calls / seconds}


if __name__ == "__main__":
    print_side(side, __doc__)
