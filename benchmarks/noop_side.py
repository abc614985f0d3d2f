"""One side of the no-op benchmark, in a fresh process: calls that do nothing, through one executor.

`python -m benchmarks.noop_side --executor stoker --how app --calls 10000` prints calls a second as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from typing import Any

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider

from stoker.manager.executor.executor import THRESHOLDS


def nothing(x: int) -> int:
    return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--executor", choices=["stoker", "htex"], required=True)
    parser.add_argument("--how", choices=["app", "sequential", "map"], required=True)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--log", action="store_true", help="Parsl's default logging")
    parser.add_argument("--prefetch", type=int, default=0, help="tasks that HTEX fetches ahead of need")
    parser.add_argument(
        "--collector", choices=["own", "calm", "usual"], default="own",
        help="how often Python's garbage collector looks: as the executor has it; as Stoker's has it; as Python has it",
    )  # fmt: skip
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="noop-")
    try:
        print(json.dumps(measure(options, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    if options.executor == "stoker":
        from stoker import StokerExecutor

        executor: Any = StokerExecutor(label="noop")
    else:
        executor = HighThroughputExecutor(
            label="noop",
            max_workers_per_node=2,
            prefetch_capacity=options.prefetch,
            provider=LocalProvider(init_blocks=1, max_blocks=1),
        )
    config = Config(
        executors=[executor], run_dir=folder, initialize_logging=options.log, usage_tracking=0, strategy="none"
    )
    usual = gc.get_threshold()
    with parsl.load(config):
        if options.collector != "own":
            gc.set_threshold(*(THRESHOLDS if options.collector == "calm" else usual))
        app = parsl.python_app(nothing)
        warm = [app(i) for i in range(200)]
        assert [future.result() for future in warm] == list(range(200))
        if options.how == "sequential":
            times = []
            for i in range(min(options.calls, 2000)):
                start = time.perf_counter()
                app(i).result()
                times.append(time.perf_counter() - start)
            times.sort()
            return {"p50_ms": 1e3 * statistics.median(times), "p99_ms": 1e3 * times[int(0.99 * len(times))]}
        if options.how == "map":
            import stoker

            mapped = stoker.app()(nothing)
            assert list(stoker.map(mapped, range(200), batch_size=1)) == [[i] for i in range(200)]
            start = time.perf_counter()
            results = [one for [one] in stoker.map(mapped, range(options.calls), batch_size=1)]
        else:
            start = time.perf_counter()
            results = [future.result() for future in [app(i) for i in range(options.calls)]]
        seconds = time.perf_counter() - start
        assert results == list(range(options.calls))
        return {"calls_per_s": options.calls / seconds}


if __name__ == "__main__":
    main()
