"""Measure the time to the first optimizer step of a prompt-tuning job, with a loaded model and from a cold start.

The time starts before `tune(job)` and includes the first evaluation (four samples). A *cold* job also includes pilot
start, imports and load, from the model file or a snapshot of an earlier pilot. The *warm* job follows. The benchmark
uses one device and SmolLM2-135M.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stoker
from benchmarks.harness import MODEL, machine, missing, ratios, run_side
from benchmarks.starting import print_side
from benchmarks.tables import Bar, Line, Table
from benchmarks.tuning.tuning_times import numbers
from stoker.apps.prompt_tuning import tune
from stoker.tuning.job import Data, Job, Metric, Prompt, Training, Until

NAME, TITLE = "tune_start", "a prompt-tuning job: from its submission to its first optimizer step"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing(*MODEL, "peft"):
        return Table(name=NAME, title=TITLE, skipped=reason)
    found: list[dict[str, Any]] = []
    for turn in range(1 if quick else 3):
        with tempfile.TemporaryDirectory(prefix="tune-start-") as state:
            places = {"STOKER_HOME": state, "STOKER_SNAPSHOTS": str(Path(state) / "snapshots")}
            first = run_side("benchmarks.tuning.tune_start", environment=places)
            second = run_side("benchmarks.tuning.tune_start", environment=places)
        say(
            f"{turn + 1}: cold {first['cold_s']:.1f} s, snapshot {second['cold_s']:.1f} s, warm {first['warm_s']:.2f} s"
        )
        found.append({**first, "snapshot_s": second["cold_s"], "again_s": second["warm_s"]})
    cold, kept, warm = ([one[name] for one in found] for name in ("cold_s", "snapshot_s", "warm_s"))
    sooner = {"times": ratios(cold, warm)}
    lines = [
        Line(what="cold: no pilot yet, the model from its file", cells={"seconds": cold}, digits=1),
        Line(what="cold: no pilot yet, the model from a snapshot", cells={"seconds": kept}, digits=1),
        Line(what="warm: the model is there", cells={"seconds": warm}, digits=2),
        Line(what="warm, times sooner than cold", cells=sooner, bar=Bar(at_least=10), last_digits=1),
        Line(what="warm, times sooner than from a snapshot", cells={"times": ratios(kept, warm)}, last_digits=1),
    ]
    return Table(name=NAME, title=TITLE, lines=lines, notes=[found[0]["machine"]])


WARM = 3
LIMIT_S = 600.0


def start_s() -> float:
    job = Job(
        data=Data("numbers", evaluation_samples=4, held_out=0.1), prompt=Prompt("Is the number even or odd?"),
        until=Until(metric=Metric.LOSS, iterations=1), training=Training(batch=4),
    )  # fmt: skip
    began = time.time()
    tuned = tune(job, samples=numbers(40), gang=1, bank=None).result(LIMIT_S)
    return float(tuned.first_step_at - began)


def side() -> dict[str, Any]:
    with stoker.load(progress=False):
        cold = start_s()
        warm = statistics.median(start_s() for _ in range(WARM))
    return {"cold_s": cold, "warm_s": warm, "machine": machine()}


if __name__ == "__main__":
    print_side(side, __doc__)
