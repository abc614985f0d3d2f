"""`stoker doctor --probe` when no pilot comes: it says why, fails, and leaves nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import write_site
from faults.world import World


def probe(world: World, command: list[str], *, wait_s: int) -> subprocess.CompletedProcess[str]:
    words = [*command, sys.executable, "-m", "stoker.manager.cli.entry", "doctor", "lab.toml"]
    process = world.spawn([*words, "--probe", "--wait", str(wait_s)], folder=world.path)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_a_pilot_that_waits_in_the_queue_proves_nothing(slurm, world):
    write_site(world.path)
    for node in slurm.shape.nodes:
        slurm.submit("sleep 600", "--partition=main", f"--nodelist={node}", "--exclusive")
    until(lambda: set(slurm.nodes().values()) == {"allocated"}, what="every node in use")
    said = probe(world, [], wait_s=25)
    assert said.returncode == 1, said.stdout
    assert re.search(r"the probe still waits in the queue after .*: (Resources|Priority|Nodes)", said.stdout), (
        said.stdout
    )
    assert "try again when the cluster is less busy" in said.stdout
    until(lambda: not [job for job in slurm.queue() if "stoker" in job[1]], what="the probe's job is cancelled")
    assert world.left() == []


def test_a_pilot_that_runs_and_reaches_nobody(make_cluster, world, monkeypatch):
    monkeypatch.chdir(world.path)  # commands on the head begin where this process is
    cluster = make_cluster(Shape(gpus=("a10:1",), namespaces=True))
    write_site(world.path, session={"interface": "127.0.0.1"})  # of the head: a node has its own
    said = probe(world, cluster.on_head(), wait_s=30)
    assert said.returncode == 1, said.stdout
    assert "the probe runs, and its pilot has not reached 127.0.0.1:" in said.stdout
    assert "name the network that they share: [session] interface" in said.stdout
    until(lambda: not [job for job in cluster.queue() if "stoker" in job[1]], what="the probe's job is cancelled")
    until(lambda: world.left() == [], what="nothing left")


@pytest.mark.long
def test_a_pilot_that_finds_no_gpu_of_those_that_were_asked_for(make_cluster, world):
    """Slurm has granted one, and no NVML is there to use it by."""
    make_cluster(Shape(gpus=("a10:1",)))
    write_site(world.path, provider={"gpus": "1"}, pilot={"devices": "auto"})
    said = probe(world, [], wait_s=60)
    assert said.returncode == 1, said.stdout
    assert "compute nodes reach this host, but" in said.stdout
    assert "asked for 1 GPU, the pilot found none (NVML missing" in said.stdout
    until(lambda: world.left() == [], what="nothing left")


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGTERM])
def test_a_probe_that_is_ended_by_a_signal_while_its_job_waits_leaves_nothing(slurm, world, how):
    write_site(world.path, provider={"options": ["--begin=now+600"]})
    words = [sys.executable, "-m", "stoker.manager.cli.entry", "doctor", "lab.toml", "--probe", "--wait", "100"]
    process = world.spawn(words, folder=world.path)
    until(lambda: [job for job in slurm.queue() if "stoker" in job[1]], what="the probe's job is in the queue")
    process.send_signal(how)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + how, out + err
    until(lambda: not [job for job in slurm.queue() if "stoker" in job[1]], what="the probe's job is cancelled")
    until(lambda: world.left() == [], what="nothing left")
