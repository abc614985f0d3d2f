"""The end of a walltime on a real Slurm, which counts it in minutes. Most of this minute is spent waiting."""

from __future__ import annotations

import time

import pytest
from batch.lab.commands import OVER
from batch.lab.shape import Shape
from batch.sessions import status_when, write_site
from faults.world import count_lines, note

import stoker

pytestmark = pytest.mark.long

CALLS = 120
"""Of half a second each: longer than the first pilot may live."""


@stoker.context
def log_of(path):
    return path


@pytest.mark.slow
def test_a_pilot_is_done_before_its_walltime_and_another_goes_on(make_cluster, world):
    """Its job ends as one that has done its work; none of the calls is cut off, and none runs again."""
    cluster = make_cluster(Shape(gpus=("a10:1",)))
    site = write_site(world.path, provider={"walltime": "1 min", "gpus": "1"})

    @stoker.app(context=log_of(str(world.path / "ran")))
    def work(log, number):
        note(log, number)
        time.sleep(0.5)
        return number

    with stoker.load(site, run_dir=str(world.runs)) as session:
        status = status_when(session, lambda status: status.pilots, what="the first pilot")
        [block], [pilot] = status.jobs, status.pilots
        assert list(stoker.map(work, range(CALLS))) == list(range(CALLS))
        assert set(count_lines(world.path / "ran").values()) == {1}
        ended = cluster.wait(block.job, *OVER, limit_s=60)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0")
        status = session.status()
        assert (status.done, status.failed, status.lost_pilots) == (CALLS, 0, 0)
        assert status.ended_blocks == {"done": 1}
        [successor] = status.jobs
        assert successor.job != block.job
        assert "its walltime is over in" in " ".join(line.text for line in session.explain(pilot.pilot).lines)
