"""slurmctld is away for a minute: nothing that runs is lost, and what it should have heard it hears afterwards."""

from __future__ import annotations

import time

import pytest
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import status_when, write_site

import stoker

AWAY_S = 60.0


def double(number):
    return 2 * number


@pytest.mark.slow
def test_slurmctld_is_away_for_a_minute(make_cluster, world):
    """Calls go on all the time. A block that is lost meanwhile is replaced when Slurm is back, once."""
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1")))
    site = write_site(world.path, pilot={"init_blocks": 2, "max_blocks": 2}, provider={"gpus": "1"})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        status = status_when(session, lambda status: len(status.pilots) == 2, what="two pilots")
        cluster.have_jobs_written()
        cluster.kill("slurmctld")
        gone_at = time.monotonic()
        trouble = status_when(session, lambda status: status.trouble, what="trouble").trouble["lab"]
        assert "Unable to contact slurm controller" in trouble
        cluster.crash("n2")
        rounds = 0
        while time.monotonic() - gone_at < AWAY_S:
            assert list(stoker.map(double, range(20))) == [2 * number for number in range(20)]
            rounds += 1
            time.sleep(2)
        status = session.status()
        assert status.trouble["lab"]
        assert (status.done, status.failed, len(status.pilots)) == (20 * rounds, 0, 1)
        kept = {block.job for block in status.jobs}
        cluster.start("slurmctld")
        cluster.start("n2")
        status_when(session, lambda status: not status.trouble, what="the trouble's end", limit_s=60)
        status_when(session, lambda status: len(status.pilots) == 2, what="two pilots again", limit_s=90)
        until(lambda: len(cluster.queue()) == 2, what="two jobs, however often Slurm was asked")
        assert kept & {block.job for block in session.status().jobs}, "the block that was not lost"
        assert session.status().lost_pilots == 1
