"""Compare this checkout with another checkout in lockstep: one process per checkout, measuring alternately.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.lockstep ../before [core_events cold_load ...] [--rounds 20] [--repeats 5]

Each round measures both checkouts in random order. A repeat starts new processes and gives the median ratio of its
rounds. A ratio above 1 means that this checkout is better, at least 0.95 "not worse". Cases of whole programs take
minutes, so they run only if they are named, with one round.

`python -m benchmarks.lockstep --side CASE` is the process of one checkout. Each line of its input triggers one
measurement, which prints the seconds per unit of the case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, commit, machine, run_side, spread, verify_facts

BAR = 0.95
BARS = {"simulator": 0.8}
"""Bars that differ from `BAR`. `simulator` has a lower bar, because it now simulates whole pilots."""
ONE_PILOT = 'name = "one"\n[provider]\nkind = "local"\n[pilot]\ndevices = "cpu:1"\nmax_blocks = 1\n'
FILE_BYTES = 1 << 20
Figure = Callable[[], float]


class Side:
    def __init__(self, checkout: Path, case: str, home: str) -> None:
        python = checkout / ".venv" / "bin" / "python"
        path = f"{python.parent}:{os.environ.get('PATH', '')}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "STOKER_HOME": home}
        command = [str(python), "-m", "benchmarks.lockstep", "--side", case]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=home, env=environment)
        self._read()  # The process is ready.

    def figure(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline().strip()):
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait(timeout=60)}")
        return line


def run_alternately(here: Path, other: Path, case: str, *, rounds: int, chance: random.Random) -> list[list[float]]:
    found = []
    with ExitStack() as stack:
        sides: dict[Path, Side] = {}
        for checkout in chance.sample([here, other], 2):
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
            sides[checkout] = side = Side(checkout, case, home)
            stack.callback(side.close)
        for _ in range(rounds):
            taken = {checkout: sides[checkout].figure() for checkout in chance.sample([here, other], 2)}
            found.append([taken[here], taken[other]])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=lambda path: Path(path).resolve(), help="another checkout, with its own .venv")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)} [all but {WHOLE}]")
    for name, count in (("rounds", 20), ("repeats", 5), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if unknown := [name for name in asked.cases if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}; one of {', '.join(CASES)}")
    chance, all_met = random.Random(asked.seed), True
    record: dict[str, Any] = {
        "machine": machine(), "at": time.strftime("%Y-%m-%d %H:%M"), "here": commit(), "other": commit(asked.other),
        "rounds": asked.rounds, "repeats": asked.repeats, "seed": asked.seed, "cases": {},
    }  # fmt: skip
    for name in asked.cases or [name for name in CASES if name not in WHOLE]:
        repeats, loads = [], []
        for _ in range(asked.repeats):
            rounds = 1 if name in WHOLE else asked.rounds
            repeats.append(run_alternately(ROOT, asked.other, name, rounds=rounds, chance=chance))
            loads.append(os.getloadavg()[0])
        better = [statistics.median(theirs / ours for ours, theirs in rounds) for rounds in repeats]
        record["cases"][name] = {"seconds": repeats, "better": better, "load": loads}
        bar = BARS.get(name, BAR)
        is_met = statistics.median(better) >= bar
        print(f"{name:<20} better {spread(better, digits=2)}  {'ok' if is_met else f'under {bar}'}", flush=True)
        all_met &= is_met
        if asked.json is not None:
            asked.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all_met)


# ---- one side


@contextmanager
def events(queued: int) -> Iterator[Figure]:
    from benchmarks.engine import core_events, driven  # Earlier checkouts have core modules elsewhere.

    driven.collect_as_the_live_loop()
    load = core_events.Load(pilots=1000, queued=queued)
    core_events.measure(load, events=200_000)
    yield lambda: 1.0 / core_events.measure(load, events=20_000)


@contextmanager
def program(how: str, calls: int) -> Iterator[Figure]:
    import stoker
    from benchmarks.engine import noop

    with noop.session(stoker.StokerExecutor(label="noop")) as seconds:

        def figure() -> float:
            if how == "sequential":
                return sum(seconds("app", 1) for _ in range(calls)) / calls
            return seconds(how, calls) / calls

        figure()
        yield figure


@contextmanager
def first_call(*, evict: bool) -> Iterator[Figure]:
    """Measure the wait of the first call of a context. `evict`: only one context fits, so another is evicted."""
    import psutil

    import stoker

    size = f"{int(0.6 * psutil.virtual_memory().total / 1e6) if evict else 20} MB"  # No context uses this memory.

    @stoker.context(memory=size, files=["path"])
    def weights(path: str) -> bytes:
        with open(path, "rb") as opened:
            return opened.read()

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loads-")))
        (folder / "one.toml").write_text(ONE_PILOT)
        stack.enter_context(stoker.load(str(folder / "one.toml")))
        numbers = iter(range(1_000_000))

        def figure() -> float:
            file = folder / f"weights-{next(numbers)}"
            file.write_bytes(os.urandom(FILE_BYTES))
            app: Any = stoker.app(context=weights(str(file)))(lambda data: len(data))
            start = time.perf_counter()
            assert app().result() == FILE_BYTES
            return time.perf_counter() - start

        for _ in range(3):
            figure()
        yield figure


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


@contextmanager
def recovery(function: str, figure: Callable[[dict[str, float]], float], **options: Any) -> Iterator[Figure]:
    from benchmarks.reliability import recovery

    yield lambda: figure(run_side(getattr(recovery, function), **options))


@contextmanager
def facts() -> Iterator[Figure]:
    yield lambda: verify_facts(Path.cwd(), "--limit", "900", "--out", f"{tempfile.mkdtemp(dir=Path.cwd())}/out")[0]


CASES: dict[str, Callable[[], AbstractContextManager[Figure]]] = {
    "core_events": partial(events, 1000), "core_events_100000": partial(events, 100_000),
    "noop": partial(program, "app", 4000), "map": partial(program, "map", 20_000),
    "sequential": partial(program, "sequential", 200),
    "cold_load": partial(first_call, evict=False), "eviction": partial(first_call, evict=True), "simulator": simulated,
    "restart": partial(recovery, "restart_manager", lambda found: found["at_work_s"]),
    "lost_pilot": partial(recovery, "lose_pilot", lambda found: found["seconds"], frozen=False),
    "many_pilots": partial(recovery, "rate", lambda found: 1.0 / found["calls_per_s"], pilots=2000), "facts": facts,
}  # fmt: skip
WHOLE = ("restart", "lost_pilot", "many_pilots", "facts")
"""Cases of whole programs."""


def serve(case: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Other output goes to stderr, so `out` has results only.
    with CASES[case]() as figure:
        print("ready", file=out, flush=True)
        for _ in sys.stdin:
            print(figure(), file=out, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
