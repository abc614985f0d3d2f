"""Run five jobs on eight GPUs and compare with allocations and cost computed by hand.

A cold start takes 23.95 s. Replicas divide the work and lose 0.5 % per doubling. Replicas of a job need 2 s to connect.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.baselines.loading import policy
from benchmarks.papers.prompt_tuner.jobs import MODELS, Parameters
from benchmarks.papers.prompt_tuner.simulate import Result, result_of, simulate_arrivals
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, LoggedEvent

USUAL = Parameters()
MODEL = MODELS["gpt2-base"]
COLD_S = USUAL.cold_s(MODEL)


def job(at_s: float, *, gpu_s: float, within_s: float) -> Arrival:
    items = round(gpu_s / MODEL.item_s)
    return Arrival(at_s, MODEL.name, items, deadline_s=within_s, gang=(1, 8), items_done=items)


JOBS = (
    job(1.0, gpu_s=20.0, within_s=60.0),  # one replica ends in time, because 23.95 + 20 s is below 60 s
    job(10.0, gpu_s=20.0, within_s=70.0),  # this job can wait for the replica of the first job, which is free at 45 s
    job(12.0, gpu_s=40.0, within_s=38.0),  # 14 s are left after a cold start: 4 replicas need 12.1 s, 3 replicas 15.4 s
    job(50.0, gpu_s=30.0, within_s=20.0),  # 2 warm replicas need 17.1 s
    job(52.0, gpu_s=100.0, within_s=5.0),  # this job cannot meet its deadline
)


def took_s(gpu_s: float, *, replicas: int) -> float:
    meets_s = USUAL.meet_s if replicas > 1 else 0.0
    doublings = {1: 0, 2: 1, 4: 2}[replicas]
    return meets_s + gpu_s / (replicas * USUAL.gang_efficiency**doublings)


def played(name: str, jobs: Sequence[Arrival] = JOBS, **settings: object) -> tuple[list[float], list[int], Result]:
    """Return end and replicas of each job, and the totals of the run."""
    simulation, outcome = simulate_arrivals(jobs, policy(name).make(**settings), USUAL, gpus=8)
    log = simulation.log
    return _ends(log), _widths(log), result_of(log, jobs, outcome, gpus=8)


def _ends(log: EventLog) -> list[float]:
    rows = zip(log.at_s, log.what, log.call, strict=True)
    return [at_s for _, at_s in sorted((call, at_s) for at_s, what, call in rows if what == LoggedEvent.CALL_ENDED)]


def _widths(log: EventLog) -> list[int]:
    parts = [
        call
        for what, call in zip(log.what, log.call, strict=True)
        if what in (LoggedEvent.CALL_BEGAN, LoggedEvent.PART_BEGAN)
    ]
    return [parts.count(call) for call in sorted(set(parts))]


def test_prompt_tuner_delays_one_job_and_starts_four_replicas() -> None:
    ends, widths, found = played("prompt-tuner")
    assert widths == [1, 1, 4, 2, 1]
    first = 1.0 + COLD_S + 20.0
    assert ends == [
        pytest.approx(first, abs=0.2),
        pytest.approx(first + 20.0, abs=0.3),  # the second job reuses the replica of the first job
        pytest.approx(12.0 + COLD_S + took_s(40.0, replicas=4), abs=0.2),
        pytest.approx(50.0 + took_s(30.0, replicas=2), abs=0.2),
        pytest.approx(152.0, abs=0.2),  # the late last job runs on an idle replica
    ]
    assert (found.late, found.refused, found.unfinished, found.loads) == (1, 0, 0, 5)


def test_infless_launches_instances_for_each_job_at_once() -> None:
    ends, widths, found = played("infless")
    assert widths[:3] == [1, 1, 4]
    # the second job did not wait for the replica of the first job
    assert ends[1] == pytest.approx(10.0 + COLD_S + 20.0, abs=0.2)
    assert (found.late, found.loads) == (1, 6)


def test_elastic_flow_loads_a_model_for_each_job_and_uses_all_gpus() -> None:
    ends, _, found = played("elastic-flow")
    assert found.late >= 2  # the fourth job is also late, because its 20 s are less than a cold start
    assert found.loads >= 8
    assert max(ends) < 152.0  # the last job ends earlier, because it gets all other devices
