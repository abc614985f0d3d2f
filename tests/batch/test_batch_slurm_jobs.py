from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from batch.lab.commands import OVER, until
from batch.lab.shape import Shape
from batch.sessions import status_when, write_site
from faults.world import World

import stoker

# ---- jobs


@stoker.context
def nothing():
    return None


@stoker.app(context=nothing())
def whereabouts(_, meeting=None, number=0):
    if meeting is not None:
        (meeting / str(number)).touch()
        until(lambda: (meeting / str(1 - number)).exists(), what="the other call")
    agents = (process for process in psutil.Process().parents() if "stoker.pilot.zygote" not in process.cmdline())
    pilot = next(process for process in agents if "SLURM_JOB_ID" in process.environ())
    given = {name: value for name, value in pilot.environ().items() if name.startswith(("SLURM", "CUDA"))}
    return {**given, "visible": os.environ["CUDA_VISIBLE_DEVICES"]}


@stoker.app(context=nothing())
def met_by(_, meeting, number, *, count):
    """Return the array variables of the task that runs this call, after `count` calls have started."""
    meeting.mkdir(exist_ok=True)
    (meeting / str(number)).touch()
    until(lambda: len(list(meeting.iterdir())) == count, what="the other calls")
    return {name: value for name, value in os.environ.items() if name.startswith("SLURM_ARRAY")}


def two_at_once(world):
    meeting = world.path / "meeting"
    meeting.mkdir()
    return [call.result(60) for call in [whereabouts(meeting, number) for number in (0, 1)]]


def test_pilots_receive_the_resources_that_the_site_requests(slurm, world):
    folder = world.path / 'it\'s a "path"'
    folder.mkdir()
    provider = {
        "gpus": "titanx:1",
        "walltime": "3 min",
        "worker_init": "export SLURM_TEST_WORDS='two words'",
        "options": ["--comment=asked", "--nodelist=n4"],
    }
    with stoker.load(write_site(folder, provider=provider), run_dir=str(folder)) as session:
        given = whereabouts().result(60)
        assert given["CUDA_VISIBLE_DEVICES"] == "0"
        assert given["SLURMD_NODENAME"] == "n4"
        assert given["SLURM_TEST_WORDS"] == "two words"
        assert "SLURM_JOB_END_TIME" not in given
        status = session.status()
        [pilot], [block] = status.pilots, status.jobs
        assert 60 < pilot.ends_in_s <= 180
        job = slurm.job(block.job)
        assert job["JobName"] == f"stoker-{session.id}-{block.block}"
        wanted = {
            "TresPerNode": "gres:gpu:titanx:1",
            "TimeLimit": "00:03:00",
            "Partition": "backfill",
            "Comment": "asked",
        }
        assert {name: job[name] for name in wanted} == wanted
    slurm.wait(block.job, *OVER)


def test_block_of_two_nodes_starts_two_pilots(slurm, world):
    site = write_site(world.path, provider={"nodes": 2, "gpus": "a10:1"})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        status = status_when(session, lambda status: len(status.pilots) == 2, what="two pilots")
        [block] = status.jobs
        assert {pilot.block for pilot in status.pilots} == {block.block}
        given = two_at_once(world)
        assert {facts["SLURMD_NODENAME"] for facts in given} == {"n1", "n2"}
        assert {facts["SLURM_JOB_ID"] for facts in given} == {block.job}
        assert {facts["CUDA_VISIBLE_DEVICES"] for facts in given} == {"0"}
    slurm.wait(block.job, *OVER)


def test_array_block_starts_one_pilot_per_task(slurm, world):
    site = write_site(world.path, provider={"gpus": "1", "options": ["--array=0-1"]})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        calls = [met_by(world.path / "met", number, count=2) for number in range(2)]
        given = [call.result(60) for call in calls]
        status = session.status()
        [block] = status.jobs
        assert {facts["SLURM_ARRAY_JOB_ID"] for facts in given} == {block.job}
        assert sorted(facts["SLURM_ARRAY_TASK_ID"] for facts in given) == ["0", "1"]
        assert {pilot.block for pilot in status.pilots} == {block.block}
        assert all(0 < pilot.ends_in_s <= 600 for pilot in status.pilots)
        slurm.cancel(f"{block.job}_1")
        status_when(session, lambda status: len(status.pilots) == 1, what="only the other task")
        assert met_by(world.path / "again", 0, count=1).result(60)["SLURM_ARRAY_TASK_ID"] == "0"
        assert [(job.block, job.phase) for job in session.status().jobs] == [(block.block, "running")]
    until(lambda: not slurm.queue(), what="no task left")


def test_pilot_offers_only_the_gpus_that_slurm_granted(make_cluster, world, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "driver")
    cluster = make_cluster(Shape(gpus=("a10:4",)))
    cluster.wait(cluster.submit("sleep 1000", "--gres=gpu:1"), "RUNNING")
    site = write_site(world.path, provider={"gpus": "a10:2"}, pilot={"devices": "gpu"})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        [pilot] = status_when(session, lambda status: status.pilots, what="the pilot").pilots
        assert [(device.device, device.kind) for device in pilot.devices] == [
            ("cuda:0", "NVIDIA A10"),
            ("cuda:1", "NVIDIA A10"),
        ]
        given = two_at_once(world)
        assert {facts["CUDA_VISIBLE_DEVICES"] for facts in given} == {"1,2"}
        assert {facts["visible"] for facts in given} == {"GPU-n1-1", "GPU-n1-2"}, "each call sees only its device"


# ---- probe


def probe(world: World, command: list[str], *, wait_s: int) -> subprocess.CompletedProcess[str]:
    words = [*command, sys.executable, "-m", "stoker.manager.cli.entry", "doctor", "lab.toml"]
    process = world.spawn([*words, "--probe", "--wait", str(wait_s)], folder=world.path)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_probe_fails_with_the_queue_reason_if_its_job_stays_pending(slurm, world):
    write_site(world.path)
    for node in slurm.shape.nodes:
        slurm.submit("sleep 600", "--partition=main", f"--nodelist={node}", "--exclusive")
    until(lambda: set(slurm.nodes().values()) == {"allocated"}, what="every node in use")
    said = probe(world, [], wait_s=3)
    assert said.returncode == 1, said.stdout
    assert re.search(r"the probe still waits in the queue after .*: (Resources|Priority|Nodes)", said.stdout), (
        said.stdout
    )
    assert "try again when the cluster is less busy" in said.stdout
    until(lambda: not [job for job in slurm.queue() if "stoker" in job[1]], what="the probe's job is cancelled")
    assert world.left() == []


def test_pilot_that_cannot_connect_to_the_manager_is_reported(make_cluster, world, monkeypatch):
    monkeypatch.chdir(world.path)  # commands on the head begin in this process's folder
    cluster = make_cluster(Shape(gpus=("a10:1",), namespaces=True))
    # pilots get a loopback address for the head; on a node this address is the node itself
    write_site(world.path, session={"interface": "127.0.0.1"})
    said = probe(world, cluster.on_head(), wait_s=8)
    assert said.returncode == 1, said.stdout
    assert "the probe runs, but its pilot has not reached 127.0.0.1:" in said.stdout
    assert "name a common network: [session] interface" in said.stdout
    until(lambda: not [job for job in cluster.queue() if "stoker" in job[1]], what="the probe's job is cancelled")
    until(lambda: world.left() == [], what="nothing left")


@pytest.mark.long
def test_probe_reports_a_pilot_that_lacks_a_requested_gpu(make_cluster, world):
    make_cluster(Shape(gpus=("a10:1",)))
    write_site(world.path, provider={"gpus": "1"}, pilot={"devices": "auto"})
    said = probe(world, [], wait_s=60)
    assert said.returncode == 1, said.stdout
    assert "compute nodes reach this host, but" in said.stdout
    assert "the job requested 1 GPU, but the pilot found none (NVML missing" in said.stdout
    until(lambda: world.left() == [], what="nothing left")
