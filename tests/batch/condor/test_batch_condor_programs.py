"""Programs over HTCondor: the manager, the factory, the jobs and the pilots in them are real."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import time
from pathlib import Path

import pytest
from environment.small import SmallEnvironment
from packaging.requirements import Requirement

import stoker

SITE = """
name = "pool"
[provider]
kind = "condor"
cores = 1
walltime = "10 min"
poll = "300 ms"
{provider}
[pilot]
devices = "cpu:1"
cache_size = "1 GB"
[session]
heartbeat = "1 s"
lease = "30 s"
interface = "127.0.0.1"
ports = "32701-32999"
[policy]
provisioning = "fixed"
{more}
"""


@stoker.context
def nothing():
    return None


@stoker.app(context=nothing())
def whereabouts(_, seconds=0.0):
    """What the pilot's job was given."""
    import time

    import psutil

    time.sleep(seconds)
    pilot = next(p for p in psutil.Process().parents() if "_CONDOR_SLOT" in p.environ())
    return pilot.environ() | {"cwd": pilot.cwd()}


def write_site(folder: Path, *, provider: str = "", more: str = "") -> Path:
    file = folder / "pool.toml"
    file.write_text(SITE.format(provider=provider, more=more))
    return file


def test_a_call_runs_in_a_slot_with_what_the_site_asks_for(pool, world):
    site = write_site(world.path, provider='gpus = "titan-x:1"')
    with stoker.load(site, run_dir=str(world.runs)) as session:
        given = whereabouts().result(120)
        assert given["CUDA_VISIBLE_DEVICES"] == "GPU-cccc0003"
        [block] = session.status().jobs
        assert (block.phase, block.reason.endswith("@n2")) == ("running", True)
        [pilot] = session.status().pilots
        assert 60 < pilot.ends_in_s <= 600
        ad = pool.ad(block.job)
        assert (ad["StokerSession"], ad["StokerBlock"]) == (session.id, block.block)
    assert pool.queued() == []


def test_an_evicted_pilot_costs_no_call(pool, world):
    """A path with blanks and quotes is no hurdle, either."""
    folder = world.path / 'it\'s a "path"'
    folder.mkdir()
    with stoker.load(write_site(folder), run_dir=str(folder)) as session:
        calls = [whereabouts(0.5) for _ in range(6)]
        first = calls[0].result(120)
        [block] = session.status().jobs
        pool.evict(block.job)
        assert {call.result(120)["_CONDOR_SLOT"] for call in calls} == {first["_CONDOR_SLOT"]}
        assert pool.ad(block.job)["NumShadowStarts"] == 2
        [again] = session.status().jobs
        assert again.job == block.job
    assert pool.queued() == []


def test_a_block_says_why_it_waits(pool, world):
    site = write_site(world.path, provider="requirements = 'TARGET.HasTape'")
    with stoker.load(site, run_dir=str(world.runs)) as session:
        deadline = time.monotonic() + 60
        while not any("none meets TARGET.HasTape" in block.reason for block in session.status(20).jobs):
            assert time.monotonic() < deadline, session.status().jobs
            time.sleep(0.2)
    assert pool.queued() == []


PROGRAM = """
import json, sys
import stoker


@stoker.context
def nothing():
    return None


@stoker.app(context=nothing())
def whereabouts(_):
    import os, sys
    return {"prefix": sys.prefix, "stoker": stoker.__file__, "ad": os.environ["_CONDOR_JOB_AD"]}


if __name__ == "__main__":
    with stoker.load(sys.argv[1], run_dir=sys.argv[2]):
        print(json.dumps(whereabouts().result(120)))
"""


@pytest.fixture
def small(tmp_path: Path) -> SmallEnvironment:
    """An environment in which programs can load a site, and that is quickly packed."""
    made = SmallEnvironment(tmp_path / "venv", tmp_path / "home")
    for name in needed("parsl") | needed("rich"):
        made.bring(name)
    return made


def needed(name: str, *, known: frozenset[str] = frozenset()) -> set[str]:
    """A distribution and all that it requires."""
    found = {name}
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.name not in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found |= needed(requirement.name, known=known | found)
    return found


def test_machines_that_see_nothing_of_ours_get_everything_sent(pool, world, small):
    site = write_site(world.path, provider="shared_files = false", more='[environment]\nkind = "packed"')
    (world.path / "program.py").write_text(PROGRAM)
    command = [small.python, str(world.path / "program.py"), str(site), str(world.runs)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    given = json.loads(ran.stdout.splitlines()[-1])
    sandbox = str(Path(given["ad"]).parent)
    assert sandbox.startswith(str(pool.folder / "execute"))
    assert given["prefix"].startswith(sandbox)
    assert given["stoker"].startswith(given["prefix"])
    assert pool.queued() == []
