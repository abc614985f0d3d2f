"""A full queue: Slurm takes no more jobs just now. The user is told in its words, no call fails, and the block is
submitted as soon as there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import status_when, write_site

import stoker

TRIES = 4
"""So many refusals would end every call that waits: three are enough."""


@contextmanager
def waiting_call(world, **provider) -> Iterator[tuple]:
    """A session, with a call for which no pilot can be had yet."""
    site = write_site(world.path, provider=provider)
    with stoker.load(site, run_dir=str(world.runs)) as session:
        yield session, stoker.app()(lambda number: 2 * number)(4)


def our_jobs(cluster) -> list[str]:
    return [line[0] for line in cluster.queue() if line[1].startswith("stoker")]


@pytest.mark.slow
def test_too_many_jobs_of_this_user(make_cluster, world):
    limits = {"AccountingStorageEnforce": "associations,limits"}
    cluster = make_cluster(Shape(gpus=("a10:1",), accounting=True, settings=limits))
    cluster.run("sacctmgr", "-i", "add", "account", "phys")
    cluster.run("sacctmgr", "-i", "add", "user", cluster.place.user, "account=phys", "MaxSubmitJobs=1")
    taken = ["sbatch", "--parsable", "--account=phys", "--output=/dev/null", "--wrap=sleep 1000"]
    until(lambda: cluster.ask(*taken).returncode == 0, what="slurmctld to hear of the account")
    with waiting_call(world, account="phys") as (session, call):
        trouble = status_when(session, lambda status: status.trouble, what="trouble").trouble["lab"]
        assert trouble.startswith("AssocMaxSubmitJobLimit; Batch job submission failed: ")
        until(lambda: refusals(cluster) > TRIES, limit_s=60, what="the same, tried again and again")
        assert not call.done()
        cluster.cancel(*(line[0] for line in cluster.queue()))
        assert call.result(60) == 8
        assert not session.status().trouble
        assert len(our_jobs(cluster)) == 1


def refusals(cluster) -> int:
    log = (cluster.place.logs / "slurmctld.log").read_text(errors="replace")
    return log.count("exceeded association/QOS limit")


@pytest.mark.long
@pytest.mark.slow
def test_too_many_jobs_of_all_users(make_cluster, world):
    """sbatch does not fail then: it says so, and tries again for minutes."""
    cluster = make_cluster(Shape(gpus=("a10:1",), settings={"MaxJobCount": "2", "MinJobAge": "2"}))
    filler = cluster.submit("sleep 1000", "--partition=main")
    with waiting_call(world, command_limit="3 s") as (session, call):
        trouble = status_when(session, lambda status: status.trouble, what="trouble").trouble["lab"]
        said = "Slurm temporarily unable to accept job, sleeping and retrying"
        assert trouble.startswith(f"sbatch has not answered for 3 s, after it had said: {said}: ")
        assert "MaxJobCount" in trouble
        assert not call.done()
        cluster.cancel(filler)
        assert call.result(60) == 8
        status_when(session, lambda status: not status.trouble, what="the trouble's end")
        assert len(our_jobs(cluster)) == 1, "however often it was tried"
