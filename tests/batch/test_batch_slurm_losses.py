from __future__ import annotations

import os
import time

import pytest
from batch.lab.commands import OVER, until
from batch.lab.shape import Shape
from batch.sessions import block_when, status_when, write_site
from faults.world import count_lines, note

import stoker

# ---- losses


CALLS, FREE = 60, 10
"""Run `CALLS` calls. Calls after the first `FREE` wait until the test has seen the loss."""


@stoker.context
def log_of(path):
    return path


@pytest.fixture
def go(world):
    return world.path / "go"


@pytest.fixture
def stream(world, go):
    log = str(world.path / "ran")

    @stoker.app(context=log_of(log))
    def work(log, number):
        while number >= FREE and not go.exists():
            time.sleep(0.02)
        time.sleep(0.05)
        note(log, f"{number} {os.environ['SLURMD_NODENAME']}")
        return number

    return lambda: stoker.map(work, range(CALLS), window=CALLS)


def load(world, **sections):
    return stoker.load(write_site(world.path, **sections), run_dir=str(world.runs))


def nodes_of(world) -> set[str]:
    return {line.split()[1] for line in count_lines(world.path / "ran")}


@pytest.mark.slow
def test_preempted_and_requeued_job_starts_a_pilot_again(slurm, world, stream, go):
    with load(world, provider={"gpus": "a10:1", "options": ["--nodelist=n1"]}) as session:
        results = stream()
        got = [next(results) for _ in range(10)]
        [block] = session.status().jobs
        pusher = slurm.submit("sleep 100", "--partition=main", "--gres=gpu:a10:1", "--nodelist=n1")
        slurm.wait(pusher, "RUNNING")
        waiting = block_when(session, lambda block: block.phase == "pending", what="the block back in the queue")
        assert (waiting.block, waiting.job) == (block.block, block.job)
        assert waiting.reason
        status_when(session, lambda status: status.losses == {"preempted": 1}, what="the reason")
        slurm.cancel(pusher)
        go.touch()
        assert [*got, *results] == list(range(CALLS))
        assert slurm.job(block.job)["Restarts"] == "1"
        status = session.status()
        assert (status.done, status.failed) == (CALLS, 0)


def test_job_cancelled_by_another_user_is_replaced(slurm, world, stream, go):
    with load(world) as session:
        results = stream()
        got = [next(results) for _ in range(5)]
        [block] = session.status().jobs
        slurm.cancel(block.job)
        new = block_when(session, lambda new: new.block != block.block, what="another block")
        go.touch()
        assert [*got, *results] == list(range(CALLS))
        assert new.job != block.job
        assert "cancel" in " ".join(session.status().ended_blocks).lower()
        assert (session.status().failed, session.status().losses) == (0, {"cancelled": 1})


@pytest.mark.long
@pytest.mark.slow
def test_node_power_loss_affects_only_the_calls_on_that_node(make_cluster, world, stream, go):
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1"), node_timeout_s=10))
    with load(world, pilot={"init_blocks": 2, "max_blocks": 2}, provider={"gpus": "a10:1"}) as session:
        status_when(session, lambda status: len(status.pilots) == 2, what="two pilots")
        results = stream()
        got = [next(results) for _ in range(10)]
        cluster.crash("n1")
        status_when(session, lambda status: status.lost_pilots, what="the loss")
        go.touch()
        assert [*got, *results] == list(range(CALLS))
        assert (session.status().lost_pilots, session.status().failed) == (1, 0)
        until(lambda: cluster.nodes()["n1"].startswith("down"), what="Slurm to miss n1")
        waiting = block_when(session, lambda block: block.phase != "running", what="a block without a node")
        assert waiting.phase == "pending"
        status_when(session, lambda status: status.losses == {"node lost": 1}, what="the reason")
        cluster.start("n1")
        status_when(session, lambda status: len(status.pilots) == 2, what="a pilot on n1 again")


@pytest.mark.long
def test_requeued_and_held_job_is_replaced(slurm, world, stream, go):
    with load(world) as session:
        results = stream()
        got = [next(results) for _ in range(5)]
        [block] = session.status().jobs
        slurm.run("scontrol", "requeuehold", block.job)
        new = block_when(session, lambda new: new.block != block.block, what="another block")
        go.touch()
        assert [*got, *results] == list(range(CALLS))
        assert new.job != block.job
        story = " ".join(line.text for line in session.explain(block.block).lines)
        assert "held by Slurm" in story
        until(lambda: block.job not in [job[0] for job in slurm.queue()], what="no held job left")
        assert session.status().failed == 0


@pytest.mark.long
def test_node_with_a_failing_prolog_does_not_stop_other_nodes(make_cluster, world, stream, go):
    prolog = world.path / "prolog.sh"
    prolog.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != n1 ]\n')
    prolog.chmod(0o755)
    make_cluster(Shape(gpus=("a10:1", "a10:1"), settings={"Prolog": str(prolog)}))
    go.touch()
    with load(world, provider={"gpus": "a10:1"}) as session:
        assert list(stream()) == list(range(CALLS))
        assert nodes_of(world) == {"n2"}
        story = " ".join(line.text for line in session.explain("b1").lines)
        assert "held by Slurm: launch failed requeued held" in story


# ---- walltime


WALLTIME_CALLS = 120
"""Number of calls of 0.5 s, which together outlast the first pilot."""


@pytest.mark.long
@pytest.mark.slow
def test_pilot_ends_before_its_walltime_and_a_new_pilot_continues(make_cluster, world):
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
        assert list(stoker.map(work, range(WALLTIME_CALLS))) == list(range(WALLTIME_CALLS))
        assert set(count_lines(world.path / "ran").values()) == {1}
        ended = cluster.wait(block.job, *OVER, limit_s=60)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0")
        status = session.status()
        assert (status.done, status.failed, status.lost_pilots) == (WALLTIME_CALLS, 0, 0)
        assert status.ended_blocks == {"done": 1}
        [successor] = status.jobs
        assert successor.job != block.job
        assert "its walltime is over in" in " ".join(line.text for line in session.explain(pilot.pilot).lines)
