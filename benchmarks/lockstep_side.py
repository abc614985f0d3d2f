"""The side of one checkout in `lockstep`: `python -m benchmarks.lockstep_side CASE`.

Each input line triggers one measurement, which prints the seconds per unit of the case as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine import noop

Figure = Callable[[], float]


@contextmanager
def events(queued: int) -> Iterator[Figure]:
    from benchmarks.engine import core_events, driven  # Earlier checkouts have core modules elsewhere.

    driven.collect_as_the_live_loop()
    load = core_events.Load(pilots=1000, queued=queued, slots=32)
    core_events.measure(load, events=200_000)
    yield lambda: 1.0 / core_events.measure(load, events=20_000)


@contextmanager
def program(how: str) -> Iterator[Figure]:
    import parsl
    from parsl.config import Config

    import stoker

    config = Config(
        executors=[stoker.StokerExecutor(label="noop")], run_dir=tempfile.mkdtemp(prefix="noop-"),
        initialize_logging=False, usage_tracking=0, strategy="none",
    )  # fmt: skip
    with parsl.load(config):
        app: Any = parsl.python_app(noop.nothing)
        mapped = stoker.app()(noop.nothing)

        def submitted(calls: int) -> None:
            assert [future.result() for future in [app(i) for i in range(calls)]] == list(range(calls))

        def mapped_all(calls: int) -> None:
            assert [one for [one] in stoker.map(mapped, range(calls), batch_size=1)] == list(range(calls))

        def one_by_one(calls: int) -> None:
            assert [app(i).result() for i in range(calls)] == list(range(calls))

        run, calls = {"app": (submitted, 4000), "map": (mapped_all, 20_000), "sequential": (one_by_one, 200)}[how]
        run(calls)

        def figure() -> float:
            start = time.perf_counter()
            run(calls)
            return (time.perf_counter() - start) / calls

        yield figure


@contextmanager
def first_call(*, evict: bool) -> Iterator[Figure]:
    import stoker
    from benchmarks.engine import loads

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loads-")))
        (folder / "one.toml").write_text(loads.SITE)
        stack.enter_context(stoker.load(str(folder / "one.toml")))
        numbers = iter(range(1_000_000))
        for _ in range(loads.WARM_UP):
            loads.first_call(folder, next(numbers), evict=evict)
        yield lambda: loads.first_call(folder, next(numbers), evict=evict)


@contextmanager
def simulated() -> Iterator[Figure]:
    from benchmarks.scale import simulator

    def figure() -> float:
        simulation = simulator.CASES["steady"](10)
        start = time.process_time()
        outcome = simulation.run()
        return (time.process_time() - start) / (outcome.core_events + outcome.calls)

    figure()
    yield figure


CASES = {
    "core_events": lambda: events(1000), "core_events_100000": lambda: events(100_000), "noop": lambda: program("app"),
    "map": lambda: program("map"), "sequential": lambda: program("sequential"),
    "cold_load": lambda: first_call(evict=False), "eviction": lambda: first_call(evict=True), "simulator": simulated,
}  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("case", choices=CASES)
    asked = ask.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Results use a separate stream.
    with CASES[asked.case]() as figure:
        print("ready", file=out, flush=True)
        for _ in sys.stdin:
            print(json.dumps(figure()), file=out, flush=True)


if __name__ == "__main__":
    main()
