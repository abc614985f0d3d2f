"""Test SchedMate's scheduling on a few jobs, compare with a second implementation, and test the error model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from scheduling_replay import in_order, least_attained

from benchmarks.baselines.loading import policy
from benchmarks.baselines.shortest_first import fifo, shortest_first
from benchmarks.baselines.tiresias import tiresias
from benchmarks.papers.schedmate.scheduling import errors, settings, simulate
from benchmarks.papers.schedmate.scheduling.simulate import (
    Case,
    Job,
    Window,
    call_of,
    completion_times_s,
    missing,
    predictions,
    windows,
    windows_of,
)
from stoker.chance import Stream
from stoker.manager.core.seams import Policies

here = pytest.mark.skipif(bool(missing()), reason=missing())

OURS_RATIOS = errors.our_log_ratios()["estimates"]


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
        # From 70 s on the queue head is the job of 500 s on all GPUs, so the job of 1,000 s waits, although it fits at
        # 90 s.
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


def test_constant_prediction_is_first_come_first_served() -> None:
    """If all predictions equal the time of the shortest job, each relative error is under 100 %, but the order is
    unknown.
    """
    smallest = [min(job.duration_s for job in LINE)] * len(LINE)
    assert errors.share_under_100([job.duration_s for job in LINE], smallest) == 1.0
    assert starts(LINE, shortest(LINE, smallest)) == starts(LINE, fifo())


def test_common_factor_of_all_predictions_changes_nothing() -> None:
    tenfold = [10 * job.duration_s for job in LINE]
    assert starts(LINE, shortest(LINE, tenfold)) == starts(LINE, shortest(LINE))


def test_shortest_job_without_predictions_uses_past_run_times() -> None:
    """All jobs call one function, so predictions are equal and jobs run in order of arrival."""
    named, other = (
        policy(f"benchmarks/baselines/shortest_first.py:{name}").make() for name in ("shortest_first", "fifo")
    )
    assert starts(LINE, named) == starts(LINE, other) == starts(LINE, fifo())


FREE = (0.0, 0.0)


def test_tiresias_preempts_only_a_job_past_the_threshold() -> None:
    """A job on 8 GPUs passes 800 GPU-seconds after 100 s. A job that arrives at 50 s waits until then; at 150 s it
    preempts at once.
    """
    later = jobs_of((0, 1000, 8), (150, 50, 8))
    assert starts(later, tiresias(thresholds_gpu_s=[800.0], restart_s=FREE)) == [50, 150]
    sooner = jobs_of((0, 1000, 8), (50, 50, 8))
    assert starts(sooner, tiresias(thresholds_gpu_s=[800.0], restart_s=FREE)) == [50, 100]
    assert starts(sooner, tiresias(thresholds_gpu_s=[8e6], restart_s=FREE)) == [0, 1000]


def test_preempted_job_pays_its_restart_and_more_on_many_gpus() -> None:
    for gpus, restart_s in ((8, 40), (16, 60)):
        jobs = jobs_of((0, 1000, gpus), (150, 50, gpus))
        found = starts(jobs, tiresias(thresholds_gpu_s=[100.0 * gpus]), gpus=gpus)
        assert found == [50 + restart_s, 150]


def test_tiresias_multiplies_attained_time_by_gpus() -> None:
    """Job 1 moves to queue two after 100 s on 4 GPUs, job 2 after 400 s on one GPU. Job 3 runs from 100 s to 200 s
    and resumes after the end of job 2.
    """
    jobs = jobs_of((0, 300, 4), (0, 300, 1), (10, 300, 4))
    assert starts(jobs, tiresias(thresholds_gpu_s=[400.0], restart_s=FREE)) == [100, 0, 200]


def test_tiresias_skips_a_job_that_needs_more_gpus_than_are_free() -> None:
    """From 200 s to 400 s job 3 runs on one GPU, so no job of 8 GPUs can resume."""
    jobs = jobs_of((0, 300, 8), (10, 120, 8), (20, 100, 1))
    assert starts(jobs, tiresias(thresholds_gpu_s=[800.0], restart_s=FREE)) == [200, 400, 200]


def test_tiresias_reports_its_number_of_preemptions() -> None:
    jobs = jobs_of((0, 1000, 8), (150, 50, 8), (300, 50, 8))
    _, preempted = completion_times_s(jobs, tiresias(thresholds_gpu_s=[800.0]), gpus=8)
    assert preempted == 2


def crowd(seed: int, count: int) -> tuple[Job, ...]:
    """Return overlapping jobs with durations like in the trace."""
    chance = Random(seed)
    rows, at_s = [], 0.0
    for _ in range(count):
        at_s += round(chance.expovariate(1 / 900))
        rows.append(
            (at_s, round(min(2e5, chance.lognormvariate(7, 1.7))) + 1.0, chance.choice([1] * 12 + [2, 4, 8, 12]))
        )
    return jobs_of(*rows)


def test_second_implementation_agrees_with_the_core() -> None:
    """Starts in the core are up to 0.1 s late, so ties may differ."""
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


def test_second_implementation_agrees_with_the_core_on_tiresias() -> None:
    jobs, gpus = crowd(0, 300), 16
    for thresholds, restart_s in (([18_000.0], (40.0, 60.0)), ([3_250.0, 7_200.0], FREE)):
        expected, times = least_attained(jobs, gpus=gpus, thresholds=thresholds, restart_s=restart_s)
        found, preempted = completion_times_s(
            jobs, tiresias(thresholds_gpu_s=thresholds, restart_s=restart_s), gpus=gpus
        )
        assert fmean(found) == pytest.approx(fmean(expected), rel=0.02)
        assert preempted == pytest.approx(times, rel=0.1)
        assert times > 20, "nothing was preempted: nothing was compared"


MANY = [float(each) for each in range(1, 20_001)]


def test_injected_errors_have_their_share_and_a_zero_mean() -> None:
    for share in (settings.LUCID_SHARE, settings.PAPER_SHARE):
        said = errors.lognormal(errors.spread_of(share), shift=errors.spread_of(share) ** 2 / 2)(
            MANY, Stream(1, "errors")
        )
        assert errors.share_under_100(MANY, said) == pytest.approx(share, abs=0.01)
    assert fmean(true / each for true, each in zip(MANY, said, strict=True)) == pytest.approx(1.0, abs=0.02)


def test_prediction_errors_match_those_on_the_page() -> None:
    page = (Path(errors.__file__).parents[1] / "estimates.md").read_text()
    for row, method in ((r"B\. the 108 others[^|]*", "estimates"), (r"B, plain average[^|]*", "average")):
        ((under, within),) = re.findall(rf"\| {row}\| ([\d.]+) % \| ([\d.]+) %", page)
        ratios = errors.our_log_ratios()[method]
        assert len(ratios) == 108
        assert 100 * fmean(ratio < math.log(2) for ratio in ratios) == pytest.approx(float(under), abs=0.05)
        assert 100 * fmean(abs(ratio) <= math.log(2) for ratio in ratios) == pytest.approx(float(within), abs=0.05)


def test_prediction_errors_are_drawn_from_the_measured_errors() -> None:
    said = errors.resampled(OURS_RATIOS)(MANY, Stream(3, "errors"))
    assert errors.share_under_100(MANY, said) == pytest.approx(0.954, abs=0.01)
    assert {round(math.log(each / true), 4) for true, each in zip(MANY, said, strict=True)} == {
        *errors.our_log_ratios()["estimates"]
    }
    some = errors.resampled(OURS_RATIOS, unknown_share=0.3)(MANY, Stream(3, "errors"))
    changed = [each for each, known in zip(some, said, strict=True) if each != known]
    assert len(changed) == pytest.approx(0.3 * len(MANY), rel=0.05)
    assert {*changed} == {10_000.5}, "the median"


def test_shuffled_predictions_are_durations_of_other_jobs() -> None:
    said = errors.shuffled(MANY, Stream(4, "errors"))
    assert sorted(said) == MANY
    assert sum(each == true for true, each in zip(MANY, said, strict=True)) < 10


def rows_of(count: int, *, every_s: int, gpus: int = 4) -> list[dict[str, str]]:
    rows = []
    for number in range(count):
        day, second = divmod(number * every_s, 86_400)
        clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        rows.append({
            "timestamp": f"2017-10-{1 + day:02} {clock}", "duration": "3600.0", "num_gpus": str(gpus), "cluster": "a"
        })  # fmt: skip
    return rows


def test_window_is_a_week_from_the_first_job_on() -> None:
    first, second = windows_of(rows_of(300, every_s=3600, gpus=8))
    assert [(each.name, len(each.jobs)) for each in (first, second)] == [("a/0", 168), ("a/1", 132)]
    assert second.jobs[0] == Job(0.0, 3600.0, 8)
    assert first.gpus_at_work == pytest.approx(8.0)


def test_weeks_with_few_jobs_or_low_load_are_excluded() -> None:
    assert not [*windows_of(rows_of(settings.LEAST_JOBS - 1, every_s=3600, gpus=8))]
    assert not [*windows_of(rows_of(168, every_s=3600, gpus=3))]


def test_cluster_has_whole_pilots_and_fits_its_largest_job() -> None:
    window = Window("a", 0, jobs_of(*((float(n), settings.WINDOW_S, 1) for n in range(20))))
    assert window.gpus_at_work == pytest.approx(20.0, rel=1e-3)
    assert (window.gpus_at(0.9), window.gpus_at(0.5)) == (24, 40)
    wide = Window("a", 0, (*window.jobs, Job(30.0, 10.0, 65)))
    assert wide.gpus_at(0.8) == 72


@here
def test_second_implementation_agrees_on_a_window_of_the_trace() -> None:
    assert len(windows()) == 58
    assert all(one.name < other.name or one.week < other.week for one, other in pairwise(windows()))
    window = min(windows(), key=lambda each: len(each.jobs))
    gpus, said = window.gpus_at(settings.MAIN_LOAD), predictions(window, Case(simulate.OURS, settings.MAIN_LOAD))
    found, _ = completion_times_s(window.jobs, simulate.policies_of(simulate.OURS, said), gpus=gpus)
    expected = in_order(window.jobs, gpus=gpus, keys=[*said.values()])
    assert fmean(found) == pytest.approx(fmean(expected), rel=0.01)


def test_error_draw_is_equal_for_all_loads_and_varies_by_draw() -> None:
    window = Window("a", 0, LINE)
    one = predictions(window, Case(simulate.OURS, 0.6, 0))
    assert predictions(window, Case(simulate.OURS, 0.8, 0)) == one
    assert predictions(window, Case(simulate.OURS_SKIP, 0.8, 0)) == one
    assert predictions(window, Case(simulate.OURS, 0.6, 1)) != one
    assert predictions(window, Case(simulate.FIFO, 0.6)) == {}
