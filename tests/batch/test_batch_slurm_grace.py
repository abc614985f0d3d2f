"""Preemption with GraceTime loses no call. A pilot in the batch shell uses the grace time; a pilot in an srun step
leaves when the grace time starts.
"""

from __future__ import annotations

import os
import time

import pytest
from batch.lab.commands import OVER, until
from batch.lab.shape import Preempt, Shape
from batch.sessions import status_when, write_site
from faults.world import count_lines, note

import stoker

CALLS = 400
GRACE_S = 6


@stoker.context
def log_of(path):
    return path


@pytest.fixture
def stream(world):
    log = str(world.path / "ran")

    @stoker.app(context=log_of(log))
    def work(log, number):
        time.sleep(0.05)
        note(log, f"{os.environ['SLURMD_NODENAME']} {time.time()} {number}")
        return number

    return lambda: stoker.map(work, range(CALLS), window=CALLS)


def ran_on(world, nodes: set[str]) -> list[float]:
    words = [line.split() for line in count_lines(world.path / "ran")]
    return [float(at) for node, at, _ in words if node in nodes]


def preempted_at(cluster, job: str) -> float:
    """Return when Slurm preempted a job, in seconds since 1970, or 0."""
    said = cluster.job(job).get("PreemptTime", "None")
    return 0.0 if said == "None" else time.mktime(time.strptime(said, "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.long
@pytest.mark.slow
def test_preempted_pilot_runs_calls_during_its_grace_time(make_cluster, world, stream):
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1"), preempt=Preempt.CANCEL, grace_s=GRACE_S))
    with stoker.load(write_site(world.path, provider={"gpus": "a10:1"}), run_dir=str(world.runs)) as session:
        results = stream()
        got = [next(results) for _ in range(5)]
        [block] = session.status().jobs
        node = cluster.job(block.job)["NodeList"]
        pusher = cluster.submit("sleep 1000", "--partition=main", "--gres=gpu:a10:1", f"--nodelist={node}")
        told_at = until(lambda: preempted_at(cluster, block.job), what="the preemption")
        cluster.wait(pusher, "RUNNING")
        worked_s = max(ran_on(world, {node})) - told_at
        assert worked_s > GRACE_S / 2, "the pilot still works during its grace time"
        assert [*got, *results] == list(range(CALLS))
        assert cluster.wait(block.job, *OVER)["JobState"] == "PREEMPTED"
        status = status_when(session, lambda status: status.losses == {"preempted": 1}, what="Slurm's reason")
        assert (status.done, status.failed) == (CALLS, 0)
        assert "preempted" in " ".join(status.ended_blocks)


@pytest.mark.long
@pytest.mark.slow
def test_preempted_multi_node_job_exits_when_grace_time_begins(make_cluster, world, stream):
    cluster = make_cluster(Shape(gpus=("a10:1",) * 4, preempt=Preempt.CANCEL, grace_s=60))
    site = write_site(world.path, provider={"gpus": "a10:1", "nodes": 2})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        status_when(session, lambda status: len(status.pilots) == 2, what="two pilots")
        results = stream()
        got = [next(results) for _ in range(5)]
        [block] = session.status().jobs
        cluster.submit("sleep 1000", "--partition=main", "--gres=gpu:a10:1", f"--nodelist={_first(cluster, block.job)}")
        until(lambda: preempted_at(cluster, block.job), what="the preemption")
        told_at = time.monotonic()
        cluster.wait(block.job, *OVER)
        assert time.monotonic() - told_at < 30, "half of the grace time was not needed"
        assert [*got, *results] == list(range(CALLS))
        status = session.status()
        assert (status.done, status.failed, status.lost_pilots) == (CALLS, 0, 2)
        status_when(session, lambda status: status.losses == {"preempted": 2}, what="Slurm's reason")


def _first(cluster, job: str) -> str:
    return "n" + cluster.job(job)["NodeList"].removeprefix("n").strip("[]").split("-")[0].split(",")[0]
