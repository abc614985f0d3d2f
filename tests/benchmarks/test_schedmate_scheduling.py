"""Test SchedMate's scheduling on a few jobs and against a second implementation, and test the error model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from scheduling_replay import in_order, least_attained

from benchmarks.baselines.shortest_first import fifo, shortest_first
from benchmarks.baselines.tiresias import tiresias
from benchmarks.papers.schedmate.scheduling import errors
from benchmarks.papers.schedmate.scheduling.simulate import (
    Job,
    call_of,
    completion_times_s,
)
from stoker.chance import Stream
from stoker.manager.core.seams import Policies


def jobs_of(*rows: tuple[float, float, int]) -> tuple[Job, ...]:
    return tuple(Job(*row) for row in rows)


def starts(jobs: tuple[Job, ...], policies: Policies, *, gpus: int = 8) -> list[int]:
    """Return each start, rounded to 10 s. A preempted job appears to start later."""
    took, _ = completion_times_s(jobs, policies, gpus=gpus)
    return [round(job.at_s + took_s - job.duration_s, -1) for job, took_s in zip(jobs, took, strict=True)]


def shortest(jobs: Sequence[Job], said: Sequence[float] | None = None, **how: bool) -> Policies:
    told = {call_of(n): s for n, s in enumerate(said or [job.duration_s for job in jobs])}
    return shortest_first(expected_s=lambda call: told[call.id], **how)


LINE = jobs_of((0, 100, 6), (10, 1000, 4), (20, 50, 2), (30, 500, 8), (40, 20, 1))


LATE = jobs_of((0, 100, 6), (10, 200, 8), (20, 300, 2))


@pytest.mark.parametrize(
    ("jobs", "policies", "begin"),
    [
        (LINE, fifo(), [0, 100, 100, 1100, 1600]),
        (LINE, fifo(skip=True), [0, 100, 20, 1100, 70]),
        # From 70 s the queue head is the job of 500 s, which needs all GPUs. The job of 1,000 s therefore waits,
        # although this job fits at 90 s.
        (LINE, shortest(LINE), [0, 600, 20, 100, 70]),
        (LATE, shortest(LATE), [0, 100, 300]),
        (LATE, shortest(LATE, skip=True), [0, 320, 20]),
    ],
    ids=["fifo", "fifo, passing", "shortest", "shortest waits", "shortest, passing"],
)
def test_only_backfilling_lets_a_job_start_before_the_queue_head(
    jobs: tuple[Job, ...], policies: Policies, begin: list[int]
) -> None:
    assert starts(jobs, policies) == begin


def test_constant_prediction_gives_first_come_first_served_order() -> None:
    """Predictions equal to the shortest job have relative errors under 100 %, but give no order of the jobs."""
    smallest = [min(job.duration_s for job in LINE)] * len(LINE)
    assert errors.error_shares([job.duration_s for job in LINE], smallest)[0] == 1.0
    assert starts(LINE, shortest(LINE, smallest)) == starts(LINE, fifo())


FREE = (0.0, 0.0)


def test_tiresias_preempts_only_a_job_past_the_threshold() -> None:
    """A job on 8 GPUs reaches 800 GPU-seconds after 100 s. A job that arrives at 50 s waits until 100 s. At 150 s a job
    preempts at once.
    """
    later = jobs_of((0, 1000, 8), (150, 50, 8))
    assert starts(later, tiresias(thresholds_gpu_s=[800.0], restart_s=FREE)) == [50, 150]
    sooner = jobs_of((0, 1000, 8), (50, 50, 8))
    assert starts(sooner, tiresias(thresholds_gpu_s=[800.0], restart_s=FREE)) == [50, 100]
    assert starts(sooner, tiresias(thresholds_gpu_s=[8e6], restart_s=FREE)) == [0, 1000]


def crowd(seed: int, count: int) -> tuple[Job, ...]:
    """Return overlapping jobs whose durations resemble the trace."""
    chance = Random(seed)
    rows, at_s = [], 0.0
    for _ in range(count):
        at_s += round(chance.expovariate(1 / 900))
        rows.append(
            (at_s, round(min(2e5, chance.lognormvariate(7, 1.7))) + 1.0, chance.choice([1] * 12 + [2, 4, 8, 12]))
        )
    return jobs_of(*rows)


def test_independent_simulation_gives_the_core_completion_times() -> None:
    """Starts in the core are up to 0.1 s late, so tied jobs may swap."""
    jobs, gpus = crowd(0, 300), 16
    durations = [job.duration_s for job in jobs]
    said = errors.lognormal(1.0)(durations, Stream(0, "test"))
    fair = [0.0] * len(jobs)
    pairs = [
        (fifo(), in_order(jobs, gpus=gpus, keys=fair)),
        (fifo(skip=True), in_order(jobs, gpus=gpus, keys=fair, skip=True)),
        (shortest(jobs), in_order(jobs, gpus=gpus, keys=durations)),
        (shortest(jobs, said), in_order(jobs, gpus=gpus, keys=said)),
    ]
    for policies, expected in pairs:
        found, _ = completion_times_s(jobs, policies, gpus=gpus)
        assert fmean(found) == pytest.approx(fmean(expected), rel=0.01)
    assert fmean(pairs[0][1]) > 1.1 * fmean(pairs[2][1]), "the jobs do not wait: nothing was compared"


def test_independent_simulation_agrees_with_the_core_on_tiresias() -> None:
    jobs, gpus = crowd(0, 300), 16
    for thresholds, restart_s in (([18_000.0], (40.0, 60.0)), ([3_250.0, 7_200.0], FREE)):
        expected, times = least_attained(jobs, gpus=gpus, thresholds=thresholds, restart_s=restart_s)
        found, preempted = completion_times_s(
            jobs, tiresias(thresholds_gpu_s=thresholds, restart_s=restart_s), gpus=gpus
        )
        assert fmean(found) == pytest.approx(fmean(expected), rel=0.02)
        assert preempted == pytest.approx(times, rel=0.1)
        assert times > 20, "nothing was preempted: nothing was compared"


def test_prediction_errors_match_those_on_the_page() -> None:
    page = (Path(errors.__file__).parents[1] / "estimates.md").read_text()
    for row, method in ((r"B\. the 108 others[^|]*", "estimates"), (r"B, plain average[^|]*", "average")):
        ((under, within),) = re.findall(rf"\| {row}\| ([\d.]+) % \| ([\d.]+) %", page)
        ratios = errors.our_log_ratios()[method]
        assert len(ratios) == 108
        assert 100 * fmean(ratio < math.log(2) for ratio in ratios) == pytest.approx(float(under), abs=0.05)
        assert 100 * fmean(abs(ratio) <= math.log(2) for ratio in ratios) == pytest.approx(float(within), abs=0.05)
