"""If Slurm refuses, hangs, is full or is down, users see the message of Slurm, and work continues when possible."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import block_when, status_when, write_site
from session.test_session_up import stoker as stoker_says

import stoker
from stoker.manager.cli.session_choice import read_session_status

# ---- troubles


def load(world, **sections):
    return stoker.load(write_site(world.path, **sections), run_dir=str(world.runs))


def double(number):
    return 2 * number


def test_status_shows_why_a_block_waits_and_its_expected_start(slurm, world):
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


# ---- unreachable


AWAY_S = 30.0


@pytest.mark.long
@pytest.mark.slow
def test_slurmctld_outage_of_half_a_minute_loses_no_call(make_cluster, world):
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1")))
    site = write_site(world.path, pilot={"init_blocks": 2, "max_blocks": 2}, provider={"gpus": "1"})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        status = status_when(session, lambda status: len(status.pilots) == 2, what="two pilots")
        cluster.have_jobs_written()
        cluster.kill("slurmctld")
        gone_at = time.monotonic()
        away = "Unable to contact slurm controller"  # a running squeue may report a reset connection first
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


def test_stoker_down_lists_jobs_that_it_could_not_cancel(make_cluster, world):
    cluster = make_cluster(Shape(gpus=("a10:1",)))
    site = write_site(world.path, pilot={"init_blocks": 1, "max_blocks": 1}, provider={"gpus": "1"})
    up = stoker_says(world, "up", str(site))
    assert up.returncode == 0, up.stderr
    session = re.search(r"session (\w+) is up", up.stdout)[1]
    until(lambda: read_session_status(session)[1].status.pilots, what="a pilot")
    [[job, *_]] = cluster.queue()
    cluster.have_jobs_written()
    cluster.kill("slurmctld")
    down = stoker_says(world, "down", session, "--wait", "1")
    assert down.returncode == 1
    said = down.stdout + down.stderr
    away = "(?:slurm controller|Connection reset)"
    assert re.search(rf"left  perhaps jobs {job} of site lab: .*{away}.*; end it: scancel {job}\n", said), said
    assert re.search(r"left  its job submitter \(pid \d+\), which keeps trying to cancel them\n", said), said
    cluster.start("slurmctld")
    until(lambda: cluster.queue() == [], what="the end of the job")
    down = stoker_says(world, "down", session)
    assert down.returncode == 0, down.stderr


# ---- full


TRIES = 4
"""More refusals than the three failures after which every waiting call would fail."""


@contextmanager
def waiting_call(world, **provider) -> Iterator[tuple]:
    site = write_site(world.path, provider=provider)
    with stoker.load(site, run_dir=str(world.runs)) as session:
        yield session, stoker.app()(lambda number: 2 * number)(4)


def our_jobs(cluster) -> list[str]:
    return [line[0] for line in cluster.queue() if line[1].startswith("stoker")]


@pytest.mark.long
@pytest.mark.slow
def test_exceeded_job_limit_of_the_user_is_shown_in_the_status(make_cluster, world):
    limits = {"AccountingStorageEnforce": "associations,limits"}
    cluster = make_cluster(Shape(gpus=("a10:1",), accounting=True, settings=limits))
    cluster.run("sacctmgr", "-i", "add", "account", "phys")
    cluster.run("sacctmgr", "-i", "add", "user", cluster.place.user, "account=phys", "MaxSubmitJobs=1")
    taken = ["sbatch", "--parsable", "--account=phys", "--output=/dev/null", "--wrap=sleep 1000"]
    until(lambda: cluster.ask(*taken).returncode == 0, what="slurmctld to hear of the account")
    with waiting_call(world, account="phys") as (session, call):
        trouble = status_when(session, lambda status: status.trouble, what="trouble").trouble["lab"]
        assert trouble.startswith("AssocMaxSubmitJobLimit; Batch job submission failed: ")
        until(lambda: refusals(cluster) > TRIES, limit_s=60, what="several refusals with the same trouble")
        assert not call.done()
        cluster.cancel(*(line[0] for line in cluster.queue()))
        assert call.result(60) == 8
        assert not session.status().trouble
        assert len(our_jobs(cluster)) == 1


def refusals(cluster) -> int:
    log = (cluster.place.logs / "slurmctld.log").read_text(errors="replace")
    return log.count("exceeded association/QOS limit")


# ---- slow node


RATE = ["root", "tbf", "rate", "800kbit", "burst", "16kb", "latency", "20s"]
ANSWER_BYTES = 40_000
CALLS = 80

PROGRAM = """
import json, os, sys, time
from collections import Counter
import stoker

@stoker.app()
def answer(number):
    time.sleep(0.05)
    return os.environ["SLURMD_NODENAME"], bytes([number]) * {size}

with stoker.load(sys.argv[1], run_dir=sys.argv[2]) as session:
    while len(session.status(60).pilots) < 2:
        time.sleep(0.1)
    got = list(stoker.map(answer, range({calls})))
    status = session.status(60)
assert [content for _, content in got] == [bytes([number]) * {size} for number in range({calls})]
nodes = Counter(node for node, _ in got)
print(json.dumps([nodes, status.lost_pilots, status.rerun_calls, status.failed]))
"""


@pytest.mark.long
def test_pilot_with_a_slow_network_stays_and_gets_fewer_calls(make_cluster, world, monkeypatch):
    monkeypatch.chdir(world.path)  # commands on the head begin in this process's folder
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1"), namespaces=True))
    slow = cluster.machines["n1"].inside("tc", "qdisc", "add", "dev", "eth0", *RATE)
    subprocess.run(slow, check=True, capture_output=True)
    subprocess.run(cluster.on_head("tc", "qdisc", "add", "dev", "vn1", *RATE), check=True, capture_output=True)
    site = write_site(
        world.path,
        provider={"gpus": "1"},
        pilot={"init_blocks": 2, "max_blocks": 2},
        session={"interface": "10.77.0.1", "heartbeat": "5 s"},
    )
    (world.path / "program.py").write_text(PROGRAM.format(size=ANSWER_BYTES, calls=CALLS))
    python = [sys.executable, str(world.path / "program.py"), str(site), str(world.runs)]
    program = world.spawn(cluster.on_head(*python), folder=world.path)
    out, err = program.communicate(timeout=180)
    assert program.returncode == 0, err
    nodes, lost, again, failed = json.loads(out.splitlines()[-1])
    assert (lost, again, failed) == (0, 0, 0)
    assert set(nodes) == {"n1", "n2"}
    assert nodes["n1"] < nodes["n2"]
