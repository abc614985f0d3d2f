"""Run calls on preemptible pilots of a real Slurm that preempts a pilot every five seconds.

*Goodput* is the run time of all calls divided by the pilot-seconds up to the last result. The side fails unless each
call has one correct result.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batch.lab import commands
from batch.lab.cluster import Cluster
from batch.lab.shape import Shape
from batch.sessions import status_when, write_site

import stoker
from benchmarks.harness import Skipped, numbers_of, run_side
from benchmarks.starting import Every, keep_state_in
from benchmarks.tables import Bar, Line, Table

NODES, EVERY_S, PUSHED_S, CALL_S = 8, 5.0, 2.0, 0.1


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    calls, repeats = (600, 1) if quick else (10_000, 3)
    if why := commands.missing_for_slurm():
        raise Skipped(why)
    runs: list[dict[str, Any]] = []
    for number in range(1, repeats + 1):
        runs.append(run_side(side, calls=calls, seed=number))
        say(f"run {number} of {repeats}: {numbers_of(runs[-1])}")
    headings = {"s": "seconds", "preempted": "preempted", "pilot-seconds": "pilot_s", "goodput": "goodput"}
    cells = {heading: [run[name] for run in runs] for heading, name in headings.items()}
    what = f"{calls:,} calls of {CALL_S:g} s on 8 nodes, a pilot preempted every 5 s"
    return Table(lines=[Line(what=what, cells=cells, bar=Bar(at_least=0.85))])


@stoker.context
def sleep_context() -> Callable[[float], None]:
    return time.sleep


@stoker.app(context=sleep_context())
def nap(sleep: Callable[[float], None], number: int) -> int:
    sleep(CALL_S)
    return number


def preempt_one(cluster: Cluster, chance: random.Random) -> None:
    jobs = [line[0] for line in cluster.queue("--states=RUNNING", "--partition=backfill")]
    if nodes := sorted(filter(None, (cluster.job(job).get("NodeList") for job in jobs))):
        cluster.submit(f"sleep {PUSHED_S}", "--partition=main", "--exclusive", f"--nodelist={chance.choice(nodes)}")


class Meter:
    def __init__(self, session: stoker.Session) -> None:
        self.pilot_s, self._session = 0.0, session
        self._last, self._pilots = time.monotonic(), len(session.status(30).pilots)

    def look(self) -> None:
        seen, now = len(self._session.status(30).pilots), time.monotonic()
        self.pilot_s += (now - self._last) * (self._pilots + seen) / 2
        self._last, self._pilots = now, seen


def side(calls: int, seed: int) -> dict[str, float]:
    with Cluster(Shape(gpus=("a10:1",) * NODES)) as cluster, tempfile.TemporaryDirectory() as place:
        os.environ |= cluster.environ
        keep_state_in(place)
        return run(cluster, Path(place), calls=calls, seed=seed)


def run(cluster: Cluster, place: Path, *, calls: int, seed: int) -> dict[str, float]:
    blocks = {"init_blocks": NODES, "max_blocks": NODES}
    site = write_site(place, provider={"gpus": "a10:1"}, pilot=blocks)
    with stoker.load(site, run_dir=f"{place}/runinfo") as session:
        status_when(session, lambda status: len(status.pilots) == NODES, what=f"{NODES} pilots", limit_s=120)
        meter, chance = Meter(session), random.Random(seed)
        begun = time.monotonic()
        with Every(0.1, meter.look), Every(EVERY_S, lambda: preempt_one(cluster, chance)):
            results = sorted(stoker.map(nap, range(calls), ordered=False))
            seconds = time.monotonic() - begun
        status = session.status()
        preempted = sum(int(line[-1]) for line in cluster.queue("--partition=backfill"))
    if preempted < seconds / EVERY_S / 2 - 1:
        raise RuntimeError(f"only {preempted} pilots were preempted in {seconds:.0f} s")
    if results != list(range(calls)) or status.failed:
        raise RuntimeError(f"{len(results)} results of {calls} calls, {status.failed} failed")
    return {
        "goodput": calls * CALL_S / meter.pilot_s, "pilot_s": meter.pilot_s, "seconds": seconds,
        "preempted": preempted,
    }  # fmt: skip
