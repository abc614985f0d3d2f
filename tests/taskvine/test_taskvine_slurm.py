from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch.lab import commands
from batch.lab.cluster import Cluster
from batch.lab.shape import Shape
from faults.world import World, command_of, kill, until

import stoker
from stoker.manager.cli import down, session_remains
from stoker.manager.executor import detached, new_sessions

SITE = """
name = "lab"
engine = "taskvine"

[provider]
kind = "slurm"
partition = "backfill"
cores = 3
memory = "1 GB"
walltime = "10 min"
worker_init = "export STOKER_LAB=first"

[pilot]
devices = "cpu:2"
cache_size = "2 GB"
init_blocks = 3
max_blocks = 3

[session]
interface = "127.0.0.1"
"""


@pytest.fixture
def slurm(taskvine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    if why := commands.missing_for_slurm():
        pytest.skip(why)
    with Cluster(Shape(gpus=("", ""))) as cluster:
        for name, value in cluster.environ.items():
            monkeypatch.setenv(name, value)
        yield cluster


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    # The limit is 60 s, because TaskVine's job runs `sleep 30` next to each worker. This process may outlive the
    # worker.
    with World(tmp_path / "world").entered(limit_s=60) as world:
        yield world


def program_of(pid: int) -> str:
    return Path((command_of(pid) or [""])[0]).name


def jobs() -> list[str]:
    said = subprocess.run(["squeue", "--noheader", "--format=%T"], capture_output=True, text=True, timeout=30)
    return sorted(said.stdout.split())


@stoker.context
def nothing():
    return 0


@stoker.app(context=nothing())
def where(_context, _number):
    time.sleep(0.2)
    return os.environ.get("SLURM_JOB_ID"), os.environ.get("STOKER_LAB")


def test_workers_are_slurm_jobs_and_end_with_the_session(slurm, world):
    site = world.path / "lab.toml"
    site.write_text(SITE)
    with stoker.load(str(site), run_dir=str(world.runs)) as session:
        until(lambda: session.status().pilots, limit_s=90, why="the first worker")
        until(lambda: jobs() == ["PENDING", "RUNNING", "RUNNING"], limit_s=60, why="two jobs run, one waits")
        places = set(stoker.map(where, range(60)))
        assert {init for _, init in places} == {"first"}
        assert len({job for job, _ in places} - {None}) == 2
    until(lambda: not jobs(), limit_s=60, why="no job is left")


def test_jobs_of_a_kept_session_are_listed_and_end_with_it(slurm, world):
    site = world.path / "lab.toml"
    site.write_text(SITE)
    folder = new_sessions.create_session(new_sessions.load_listed_sites([site]))
    detached.start_session_manager(folder, on_wait=print)
    until(lambda: jobs() == ["PENDING", "RUNNING", "RUNNING"], limit_s=60, why="two jobs run, one waits")
    [kept] = session_remains.find_jobs(folder, None)
    assert kept.what.endswith("of site lab")
    assert len(kept.remove.split()) == 4
    assert kept.remove.startswith("scancel ")
    kill(
        world.of("stoker.pilot.taskvine.main") + [pid for pid in world.processes() if program_of(pid) == "vine_factory"]
    )
    down.end_session(folder)
    until(lambda: not world.of("stoker.manager.main") and not world.of("stoker.pilot.taskvine.main"), limit_s=60)
    [still] = session_remains.find_jobs(folder, None)  # the killed factory has removed no job
    subprocess.run(still.remove.split(), check=True, timeout=30)
    until(lambda: not jobs(), limit_s=60, why="no job is left")
    assert down.wait_until_gone(folder, None, wait_s=60, on_wait=print) == []
