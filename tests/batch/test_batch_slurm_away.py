"""slurmctld is away for a minute: nothing that runs is lost, and what it should have heard it hears afterwards."""

from __future__ import annotations

import re
import sys
import time

import pytest
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import status_when, write_site

import stoker

AWAY_S = 60.0


def double(number):
    return 2 * number


@pytest.mark.long
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
        away = "Unable to contact slurm controller"  # a squeue that was under way may report a reset connection before
        status_when(session, lambda status: away in status.trouble.get("lab", ""), what=away)
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


def test_down_names_slurm_and_the_jobs_that_it_could_not_cancel(make_cluster, world):
    def stoker_says(*arguments: str) -> tuple[int, str]:
        process = world.spawn([sys.executable, "-m", "stoker.manager.cli.entry", *arguments], folder=world.path)
        out, err = process.communicate(timeout=120)
        return process.returncode, out + err

    cluster = make_cluster(Shape(gpus=("a10:1",)))
    site = write_site(world.path, pilot={"init_blocks": 1, "max_blocks": 1}, provider={"gpus": "1"})
    code, said = stoker_says("up", str(site))
    assert code == 0, said
    session = re.search(r"session (\w+) is up", said)[1]
    until(lambda: "1 here" in stoker_says("status", session)[1], what="a pilot")
    [[job, *_]] = cluster.queue()
    cluster.have_jobs_written()
    cluster.kill("slurmctld")
    code, said = stoker_says("down", session, "--wait", "1")
    assert code == 1
    away = "(?:slurm controller|Connection reset)"
    assert re.search(rf"left  perhaps jobs {job} of site lab: .*{away}.*; end it: scancel {job}\n", said), said
    assert re.search(r"left  its job submitter \(pid \d+\), which keeps trying to cancel them\n", said), said
    cluster.start("slurmctld")
    until(lambda: stoker_says("down", session)[0] == 0, what="the end of the session")
    assert cluster.queue() == []
