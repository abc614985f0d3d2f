from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import fmean, median

import pytest

from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.jobs import (
    MODELS,
    Job,
    Parameters,
    jobs,
)
from benchmarks.papers.prompt_tuner.report import PAGE
from benchmarks.papers.prompt_tuner.simulate import result_of
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import RunOutcome

USUAL = Parameters()
MEDIUM = paper.LOADS["medium"]


def fullest(found: list[Job]) -> int:
    return max(Counter(int(job.at_s // 60) for job in found).values())


@pytest.mark.parametrize("load", paper.LOADS)
def test_workload_peak_minute_has_five_times_the_mean_arrivals(load: str) -> None:
    for seed in range(5):
        found = jobs(paper.LOADS[load], USUAL, seed=seed)
        assert Counter(job.model for job in found) == paper.LOADS[load]
        assert all(a.at_s <= b.at_s for a, b in pairwise(found))
        assert found[0].at_s >= 0.0
        assert found[-1].at_s < 20 * 60.0
        assert fullest(found) == round(5 * len(found) / 20)


def test_durations_have_the_documented_shape_and_bounds() -> None:
    found = [job for seed in range(100) for job in jobs(MEDIUM, USUAL, seed=seed)]
    durations = [job.duration_s for job in found]
    assert median(durations) == pytest.approx(USUAL.duration_median_s, rel=0.03)
    assert (min(durations), max(durations)) == (USUAL.duration_least_s, USUAL.duration_most_s)
    shares = Counter(job.replicas for job in found)
    for replicas, share in USUAL.replicas:
        assert shares[replicas] / len(found) == pytest.approx(share, abs=0.01)
    # These means are in the docstring of `Parameters`.
    assert fmean(job.duration_s * job.replicas for job in found) == pytest.approx(78.0, rel=0.03)
    assert fmean(durations) == pytest.approx(46.0, rel=0.03)
    cold_s = fmean(USUAL.cold_s(MODELS[job.model]) for job in found)
    assert 0.37 <= cold_s / (cold_s + fmean(durations)) <= 0.41


def test_every_parameter_has_a_source_and_a_reason() -> None:
    lines = PAGE.read_text().splitlines()
    for name in Parameters.__struct_fields__:
        (line,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert all(line.split(" | ")[1:]), name


def outcome(*, ended_at: float) -> RunOutcome:
    return RunOutcome(True, ended_at, 4, 4, {}, 0, {}, 0, 0, busy_s=44.0, warm_s=440.0)


def test_each_job_outcome_is_counted_once() -> None:
    log = EventLog()
    came = [Arrival(at_s=at_s, context="m", deadline_s=20.0) for at_s in (0.0, 1.0, 2.0, 3.0)]
    for call, each in enumerate(came):
        log.add_row(each.at_s, LoggedEvent.CALL_CAME, call=call + 50)
    log.add_row(0.0, LoggedEvent.LIBRARY_STARTED, library=1)
    log.add_row(4.0, LoggedEvent.CALL_FAILED, call=53)
    log.add_row(8.0, LoggedEvent.LIBRARY_READY, library=1, value=8.0)
    log.add_row(10.0, LoggedEvent.CALL_BEGAN, call=50, library=1)
    log.add_row(20.0, LoggedEvent.CALL_ENDED, call=50, library=1)  # the call ends just in time
    log.add_row(19.0, LoggedEvent.LIBRARY_READY, library=2, value=4.0)
    log.add_row(20.0, LoggedEvent.LIBRARY_READY, library=3, value=20.0)  # a library that no job uses
    log.add_row(20.0, LoggedEvent.PART_BEGAN, call=51, library=2, value=1)
    log.add_row(21.0, LoggedEvent.CALL_BEGAN, call=51, library=1)
    log.add_row(22.0, LoggedEvent.CALL_ENDED, call=51, library=1)  # the call ends a second late
    found = result_of(log, came, outcome(ended_at=100.0), gpus=8)
    assert (found.jobs, found.late, found.refused, found.unfinished, found.loads) == (4, 1, 1, 1, 1)
    assert found.violations == 75.0
    assert found.all_s == 8 * 1200.0  # jobs come for 20 minutes
    # call 51 waited 7 s for the first load, which takes 8 s and started a second before the call, and 4 s for the
    # second load
    both = 8 / 20, (7 + 4) / 21
    assert (found.start_share, found.start_most) == (pytest.approx(sum(both) / 2), pytest.approx(both[1]))
    assert (found.held_s, found.all_s) == (440.0, 9600.0)
