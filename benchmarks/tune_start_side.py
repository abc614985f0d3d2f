"""The side of `tune_start`: one session, whose first job finds nothing and whose next ones find the model hot."""

from __future__ import annotations

import json
import statistics
import time

import stoker
from benchmarks.paired import machine
from stoker.apps.prompt_tuning import tune
from stoker.tuning.job import Data, Job, Metric, Prompt, Sample, Training, Until

WARM = 3
LIMIT_S = 600.0


def start_s() -> float:
    """Seconds from a job's submission to its first step."""
    samples = [Sample(f"The number is {number}.", "even" if number % 2 == 0 else "odd") for number in range(40)]
    job = Job(
        data=Data("numbers", evaluation_samples=4, held_out=0.1),
        prompt=Prompt("Is the number even or odd?"),
        until=Until(metric=Metric.LOSS, iterations=1),
        training=Training(batch=4),
    )
    began = time.time()
    tuned = tune(job, samples=samples, gang=1, bank=None).result(LIMIT_S)
    return float(tuned.first_step_at - began)


def main() -> None:
    with stoker.load(progress=False):
        cold = start_s()
        warm = statistics.median(start_s() for _ in range(WARM))
    print(json.dumps({"cold_s": cold, "warm_s": warm, "machine": machine()}))


if __name__ == "__main__":
    main()
