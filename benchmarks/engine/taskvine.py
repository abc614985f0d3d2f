"""Compare no-op calls: Stoker's python_app against TaskVine's FunctionCall, alternating, 2 slots each.

TaskVine runs functions `direct` (in the library process, like Stoker) or by `fork` (the default). The benchmark
requires `ndcctools` of conda-forge.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine import noop
from benchmarks.harness import Skipped, end_all, in_turns, path, run_side, until
from benchmarks.tables import Bar, Table, versus

WARM_S = 120.0


def nothing(x):  # type: ignore[no-untyped-def]  # TaskVine sends the source, so use no names of this module
    return x


def check_taskvine() -> None:
    try:
        importlib.import_module("ndcctools.taskvine")
        importlib.import_module("ndcctools.poncho.package_serverize")  # Libraries need this module.
    except ImportError as error:
        raise Skipped(f"ndcctools does not import: {error}") from None
    if not worker_command():
        raise Skipped("ndcctools imports, but there is no vine_worker beside it or on PATH")


def worker_command() -> str:
    package = importlib.import_module("ndcctools")
    folders = [str(parent / "bin") for parent in Path(package.__path__[0]).parents[:4]]
    return shutil.which("vine_worker", path=os.pathsep.join([os.environ.get("PATH", ""), *folders])) or ""


def side(mode: str, workers: int, slots: int, calls: int, sequential: int) -> dict[str, float]:
    """Run calls. `sequential`: number of calls that run first, one after another."""
    with tempfile.TemporaryDirectory(prefix="vine-", ignore_cleanup_errors=True) as folder:
        found = timed(mode, workers, slots, calls, sequential, Path(folder))
        gc.collect()  # The manager writes its last log in its finalizer.
    return found


def timed(mode: str, workers: int, slots: int, calls: int, sequential: int, folder: Path) -> dict[str, float]:
    vine: Any = importlib.import_module("ndcctools.taskvine")
    manager = vine.Manager(port=0, run_info_path=str(folder), staging_path=str(folder))
    library = manager.create_library_from_functions("bench", nothing, add_env=False, exec_mode=mode)
    library.set_cores(slots)
    library.set_function_slots(slots)
    manager.install_library(library)

    def call(x: int) -> None:
        task = vine.FunctionCall("bench", "nothing", x)
        task.set_cores(1)
        manager.submit(task)

    used: set[str] = set()

    def results(count: int, *, within_s: float = 900.0) -> list[int]:
        got: list[int] = []

        def are_done() -> bool:
            if (task := manager.wait(1)) is not None:
                got.append(task.output)
                used.add(task.addrport)
            return len(got) == count

        until(are_done, within_s, f"the ends of {count} calls", every_s=0.0)
        return got

    with running(manager.port, count=workers, cores=slots, folder=folder):

        def has_used_all() -> bool:
            for x in range(200):
                call(x)
            check_results(results(200, within_s=WARM_S), 200)
            return len(used) == workers

        until(has_used_all, WARM_S, "an answer of a library on each worker")
        times = []
        for x in range(sequential):
            start = time.perf_counter()
            call(x)
            [same] = results(1)
            times.append(time.perf_counter() - start)
            check_results([same - x], 1)
        used.clear()
        start = time.perf_counter()
        for x in range(calls):
            call(x)
        got = results(calls)
        seconds = time.perf_counter() - start
        check_results(got, calls)
        if len(used) != workers:
            raise RuntimeError(f"the calls ran on {len(used)} workers, not on {workers}")
        return {"calls_per_s": calls / seconds, "p50_ms": 1e3 * statistics.median(times)}


def check_results(got: list[Any], count: int) -> None:
    if sorted(got) != list(range(count)):
        raise RuntimeError(f"{count} calls brought back something else: {got[:5]}")


@contextlib.contextmanager
def running(port: int, *, count: int, cores: int, folder: Path) -> Iterator[None]:
    # Libraries start as `python`, so this interpreter must come first in PATH.
    environment = {**os.environ, "PATH": path()}
    started = []
    try:
        for number in range(count):
            command = [
                worker_command(), "--cores", str(cores), "--memory", "2000", "--disk", "2000", "--timeout", "60",
                "--workdir", str(folder / f"worker-{number}"), "localhost", str(port),
            ]  # fmt: skip
            quiet = subprocess.DEVNULL
            started.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
        yield
    finally:
        end_all(started, limit_s=10)


SHAPES: dict[str, dict[str, Any]] = {"direct": {"workers": 2, "slots": 1}, "fork": {"workers": 1, "slots": 2}}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    check_taskvine()
    repeats, calls, theirs_calls = 5, 10_000, {"direct": 4000, "fork": 1000}
    if quick:
        repeats, calls, theirs_calls = 1, 500, {"direct": 200, "fork": 50}
    sequential = 20 if quick else 300

    def ours() -> dict[str, float]:
        rate, one = (run_side(noop.side, executor="stoker", how=how, calls=calls) for how in ("app", "sequential"))
        return {**rate, **one}

    def theirs(mode: str) -> dict[str, float]:
        return run_side(side, mode=mode, calls=theirs_calls[mode], sequential=sequential, **SHAPES[mode])

    sides: dict[str, Callable[[], dict[str, float]]] = {
        "Stoker": ours,
        **{mode: partial(theirs, mode) for mode in SHAPES},
    }
    numbers = {
        (name, figure): [one[figure] for one in several]
        for name, several in in_turns(sides, repeats, say).items()
        for figure in ("calls_per_s", "p50_ms")
    }
    lines = []
    for mode, bar in (("direct", Bar(at_least=10, repeats=3)), ("fork", None)):
        rates = {"Stoker": numbers["Stoker", "calls_per_s"], "TaskVine": numbers[mode, "calls_per_s"]}
        lines.append(versus(f"calls/s, TaskVine {mode}", rates, bar=bar, last=1))
    for mode in SHAPES:
        times = {"Stoker": numbers["Stoker", "p50_ms"], "TaskVine": numbers[mode, "p50_ms"]}
        lines.append(versus(f"one call after another, p50 in ms, TaskVine {mode}", times, digits=2))
    return Table(lines=lines)
