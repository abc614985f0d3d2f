"""Slurm refuses, hangs, is full, is away: the user is told in its own words, and the work goes on when it can."""

from __future__ import annotations

import os

import pytest
from batch.lab.commands import until
from batch.sessions import block_when, status_when, write_site

import stoker
from stoker.errors import StokerError


def load(world, **sections):
    return stoker.load(write_site(world.path, **sections), run_dir=str(world.runs))


def double(number):
    return 2 * number


def test_what_slurm_refuses_fails_the_calls_in_its_own_words(slurm, world):
    """Nothing waits for a block that will never be."""
    with load(world, provider={"partition": "gpu"}):
        with pytest.raises(StokerError, match="Invalid partition name specified") as caught:
            stoker.app()(double)(1).result(60)
        assert "lab" in str(caught.value), "which site it is"


def test_a_full_cluster_shows_why_a_block_waits_and_when_it_should_start(slurm, world):
    for node in slurm.shape.nodes:
        slurm.submit("sleep 1000", "--partition=main", "--exclusive", f"--nodelist={node}", "--time=7")
    until(lambda: all(line[2] == "RUNNING" for line in slurm.queue()), what="a full cluster")
    with load(world) as session:
        call = stoker.app()(double)(4)
        waiting = block_when(session, lambda block: block.expected_in_s > 0, what="an expected start")
        assert waiting.phase == "pending"
        assert waiting.reason in ("Resources", "Priority")
        assert 60 < waiting.expected_in_s <= 7 * 60
        assert waiting.reason in str(session.status())
        slurm.cancel(*(line[0] for line in slurm.queue("--partition=main")))
        assert call.result(60) == 8


def test_a_partition_that_is_down_says_so(slurm, world):
    slurm.run("scontrol", "update", "PartitionName=backfill", "State=DOWN")
    try:
        with load(world) as session:
            waiting = block_when(session, lambda block: block.reason, what="a reason")
            assert "PartitionDown" in waiting.reason
    finally:
        slurm.run("scontrol", "update", "PartitionName=backfill", "State=UP")


@pytest.mark.long
def test_a_slurmctld_that_hangs_is_told_and_the_block_is_submitted_when_it_goes_on(slurm, world):
    """It accepts connections and is silent; what there is is asked first, so that nothing is submitted meanwhile."""
    slurm.freeze("slurmctld")
    with load(world, provider={"command_limit": "4 s"}) as session:
        call = stoker.app()(double)(5)
        status = status_when(session, lambda status: status.trouble, what="trouble")
        assert status.trouble["lab"] == "squeue has not answered for 4 s"
        slurm.thaw("slurmctld")
        assert call.result(60) == 10
        status = status_when(session, lambda status: not status.trouble, what="the trouble's end")
        assert len(status.jobs) == 1
        assert len(slurm.queue()) == 1


@pytest.mark.long
def test_sbatch_that_hangs_is_told_and_no_block_is_submitted_twice(slurm, world, monkeypatch):
    """It is given up, and its job is there all the same."""
    slow = world.path / "slow"
    slow.mkdir()
    made = slow / "made"
    program = f'PATH="{os.environ["PATH"]}" sbatch --parsable "$@" >>{made}\nexec sleep 600\n'
    (slow / "sbatch").write_text(f"#!/bin/sh\n{program}")
    (slow / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow}:{os.environ['PATH']}")
    with load(world, provider={"command_limit": "4 s"}) as session:
        call = stoker.app()(double)(5)
        status = status_when(session, lambda status: status.trouble, what="trouble")
        assert status.trouble["lab"] == "sbatch has not answered for 4 s"
        [asked] = status.jobs
        assert call.result(60) == 10
        status = status_when(session, lambda status: not status.trouble, what="the trouble's end")
        [block] = status.jobs
        assert block.block == asked.block, str(session.explain(asked.block))
        assert set(made.read_text().split()) <= {block.job}, "sbatch has made another job"
        assert [line[0] for line in slurm.queue()] == [block.job]


@pytest.mark.long
def test_pilots_go_on_while_slurmctld_is_away(slurm, world):
    with load(world) as session:
        assert stoker.app()(double)(1).result(60) == 2
        slurm.have_jobs_written()
        slurm.kill("slurmctld")
        status = status_when(session, lambda status: status.trouble, what="trouble")
        assert "slurm" in status.trouble["lab"].lower()
        assert list(stoker.map(double, range(500))) == [2 * number for number in range(500)]
        slurm.start("slurmctld")
        status = status_when(session, lambda status: not status.trouble, what="the trouble's end")
        assert (status.lost_pilots, len(status.pilots), len(status.jobs)) == (0, 1, 1)
