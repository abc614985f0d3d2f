"""Compare no-op calls on a loaded context: Stoker against Parsl's HighThroughputExecutor, alternating, 2 slots each.

Stoker runs the garbage collector less often in a session. The lines show results with and without this change.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider

import stoker
from benchmarks.harness import in_turns, run_side
from benchmarks.tables import Bar, Table, versus

AHEAD = 1000
"""Number of tasks that HTEX prefetches in one line."""


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pairs, calls = (1, 300) if quick else (5, 10_000)
    ways: dict[str, dict[str, Any]] = {
        "app": {}, "seq": {"how": "sequential"}, "app_both": {"collector": "calm"},
        "app_neither": {"collector": "usual"}, "log": {"log": True},
    }  # fmt: skip
    sides = {
        f"{prefix}{name}": partial(_figure, executor=executor, calls=calls, **way)
        for prefix, executor in (("", "stoker"), ("htex_", "htex"))
        for name, way in ways.items()
    }
    sides["htex_ahead"] = partial(_figure, executor="htex", calls=calls, collector="calm", prefetch=AHEAD)
    sides["map"] = partial(_figure, executor="stoker", how="map", calls=10 * calls)
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
    return Table(lines=lines)


def _figure(**options: Any) -> float:
    [figure] = run_side(side, **options).values()
    return float(figure)


def nothing(x: int) -> int:
    return x


def side(
    executor: str, how: str = "app", calls: int = 10_000, log: bool = False, prefetch: int = 0,
    collector: str = "own", site: str = "",
) -> dict[str, float]:  # fmt: skip
    """Run calls of the executor `stoker` or `htex` by `app`, `sequential` or `map`. `log`: Parsl's default logging is
    on; `prefetch`: number of tasks that HTEX fetches in advance; `collector`: garbage collector of the executor
    (`own`), of Stoker (`calm`) or of Python (`usual`); `site`: site file for Stoker.
    """
    if executor == "stoker":
        used: Any = stoker.StokerExecutor(site=site or None, label="noop")
    else:
        local = LocalProvider(init_blocks=1, max_blocks=1)
        used = HighThroughputExecutor(label="noop", max_workers_per_node=2, prefetch_capacity=prefetch, provider=local)
    with session(used, log=log, collector=collector) as seconds:
        if how == "sequential":
            return {"p50_ms": 1e3 * statistics.median(seconds("app", 1) for _ in range(min(calls, 2000)))}
        seconds(how, 200)
        return {"calls_per_s": calls / seconds(how, calls)}


@contextmanager
def session(executor: Any, *, log: bool = False, collector: str = "own") -> Iterator[Callable[[str, int], float]]:
    """Load an executor. Yield a function that makes a number of calls by `app` or `map`, and returns their seconds."""
    usual = gc.get_threshold()
    with tempfile.TemporaryDirectory(prefix="noop-", ignore_cleanup_errors=True) as folder:
        config = Config(executors=[executor], run_dir=folder, initialize_logging=log, usage_tracking=0, strategy="none")
        with parsl.load(config):
            if collector == "calm":
                from stoker.manager.executor.executor import GC_THRESHOLDS

                gc.set_threshold(*GC_THRESHOLDS)
            elif collector == "usual":
                gc.set_threshold(*usual)
            # Parsl pickles functions of a user's script by value.
            own = FunctionType(nothing.__code__, vars(sys.modules["__main__"]))
            app, mapped = parsl.python_app(own), stoker.app()(own)

            def seconds(how: str, calls: int) -> float:
                start = time.perf_counter()
                if how == "map":
                    results = [one for [one] in stoker.map(mapped, range(calls), batch_size=1)]
                else:
                    results = [future.result() for future in [app(i) for i in range(calls)]]
                taken = time.perf_counter() - start
                assert results == list(range(calls))
                return taken

            seconds("app", 200)
            yield seconds
