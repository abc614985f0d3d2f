"""The side of `tuning_times`: tuning jobs in one session, alone and on two devices; prints JSON.

Two jobs on one device come first: the second, which meets a hot model and a bank that is built, is what forecasts are
made from. Then the same job on two devices. A job's own clock says what it spent, by part (`stoker.tuning.pace`).
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import stoker
from benchmarks.paired import machine
from stoker.apps.prompt_tuning import tune
from stoker.tuning.job import Data, Job, Metric, Prompt, Sample, Training, Until

ITERATIONS = 12
LIMIT_S = 1800.0


def job(name: str) -> Job:
    """A job that begins with a lookup, and does all its iterations."""
    return Job(
        name=name,
        data=Data("numbers", evaluation_samples=8, held_out=0.1),
        prompt=Prompt(""),
        until=Until(metric=Metric.LOSS, iterations=ITERATIONS, evaluate_every=4),
        training=Training(batch=8),
    )


def main() -> None:
    samples = [Sample(f"The number is {number}.", "even" if number % 2 == 0 else "odd") for number in range(60)]
    found: dict[str, Any] = {"machine": machine(), "iterations": ITERATIONS}
    with tempfile.TemporaryDirectory(prefix="tuning-times-") as bank, stoker.load(progress=False):
        for what, gang in (("first", 1), ("one", 1), ("two", 2)):
            tuned = tune(job(what), samples=samples, gang=gang, bank=bank).result(LIMIT_S)
            if not tuned.initial_from.startswith("the bank"):
                raise RuntimeError(f"no lookup was made: {tuned.initial_from}")
            found[what] = {
                "spent_s": tuned.spent_s, "devices": tuned.devices, "communication": tuned.communication_share,
                "points": len(tuned.points),
            }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
