from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from batch.condor.machines import machine
from batch.test_batch_site_suite import prove
from environment.small import SmallEnvironment
from faults.world import until

import stoker

# ---- programs


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
{most}
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
def whereabouts(_, go=None):
    """Wait for the file `go` if given; return the environment and folder of the pilot job."""
    import time

    import psutil

    while go is not None and not go.exists():
        time.sleep(0.02)
    agents = [process for process in psutil.Process().parents() if "stoker.pilot.zygote" not in process.cmdline()]
    pilot = next(process for process in agents if "_CONDOR_SLOT" in process.environ())
    return pilot.environ() | {"cwd": pilot.cwd()}


def write_site(folder: Path, *, provider: str = "", more: str = "", blocks: int = 0) -> Path:
    file = folder / "pool.toml"
    most = f"max_blocks = {blocks}" if blocks else ""
    file.write_text(SITE.format(provider=provider, more=more, most=most))
    return file


def test_call_runs_in_a_slot_with_the_requests_of_the_site(pool, world):
    site = write_site(world.path, provider='gpus = "titan-x:1"')
    with stoker.load(site, run_dir=str(world.runs)) as session:
        given = whereabouts().result(120)
        assert given["CUDA_VISIBLE_DEVICES"] == "GPU-cccc0003"
        until(
            lambda: session.status().jobs[0].reason.rstrip("@").endswith("@n2"), why="HTCondor says where the job runs"
        )
        [block] = session.status().jobs
        assert block.phase == "running"
        [pilot] = session.status().pilots
        assert 60 < pilot.ends_in_s <= 600
        ad = pool.ad(block.job)
        assert (ad["StokerSession"], ad["StokerBlock"]) == (session.id, block.block)
    assert pool.queued() == []


@pytest.mark.long
def test_evicted_pilot_loses_no_call(pool, world):
    folder = world.path / 'it\'s a "path"'
    folder.mkdir()
    with stoker.load(write_site(folder), run_dir=str(folder)) as session:
        go = world.path / "go"
        calls = [whereabouts(), *(whereabouts(go) for _ in range(5))]
        first = calls[0].result(120)
        [block] = session.status().jobs
        pool.evict(block.job)
        until(lambda: block.job not in [other.job for other in session.status().jobs], why="the eviction is seen")
        go.touch()
        assert {call.result(120)["_CONDOR_SLOT"] for call in calls} == {first["_CONDOR_SLOT"]}
        status = session.status()
        assert (status.failed, status.losses) == (0, {"preempted": 1})
        assert [again.job for again in status.jobs] != [block.job]
    assert pool.queued() == []


@stoker.context
def gate(path):
    return Path(path)


def write(go, number):
    """Use the library's temporary folder. Calls from number 50 on wait for `go`."""
    import tempfile
    import time

    while number >= 50 and not go.exists():
        time.sleep(0.02)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("x")
    time.sleep(0.02)
    return number


def machine_of(ad):
    return ad["RemoteHost"].rstrip("@").rpartition("@")[2]


@pytest.mark.long
def test_dead_machine_is_replaced_before_condor_notices(make_pool, world):
    pool = make_pool(machine("n1"), machine("n2"))
    site = write_site(world.path)
    site.write_text(site.read_text().replace('lease = "30 s"', 'lease = "4 s"'))
    with stoker.load(site, run_dir=str(world.runs)) as session:
        go = world.path / "go"
        results = stoker.map(stoker.app(context=gate(str(go)))(write), range(200), window=200)
        got = [next(results) for _ in range(10)]
        [block] = session.status().jobs
        pool.crash(machine_of(pool.ad(block.job)))
        go.touch()
        assert [*got, *results] == list(range(200))
        status = session.status()
        assert (status.failed, status.lost_pilots) == (0, 1)
        assert pool.ad(block.job)["JobStatus"] == 3
        assert "the batch system still lists its job as running" in str(session.explain(block.block))


def test_block_reports_why_it_waits(pool, world):
    site = write_site(world.path, provider="requirements = 'TARGET.HasTape'")
    with stoker.load(site, run_dir=str(world.runs)) as session:
        told = lambda: any("none meets TARGET.HasTape" in block.reason for block in session.status(20).jobs)  # noqa: E731
        until(told, why="the analysis of a waiting job")
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
    """Return a small environment that packs quickly and in which programs can load a site."""
    made = SmallEnvironment(tmp_path / "venv", tmp_path / "home")
    made.bring_all("parsl", "rich")
    return made


@pytest.mark.long
def test_machines_without_a_shared_file_system_receive_all_files(pool, world, small):
    site = write_site(world.path, provider="shared_files = false", more='[environment]\nkind = "packed"')
    (world.path / "program.py").write_text(PROGRAM)
    command = [small.python, str(world.path / "program.py"), str(site), str(world.runs)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    given = json.loads(ran.stdout.splitlines()[-1])
    sandbox = str(Path(given["ad"]).parent)
    assert Path(sandbox).is_relative_to(pool.folder)
    assert "execute" in Path(sandbox).parts
    assert given["prefix"].startswith(sandbox)
    assert given["stoker"].startswith(given["prefix"])
    assert pool.queued() == []


# ---- site suite


@pytest.mark.long
@pytest.mark.slow
def test_doctor_tests_of_a_site_pass_on_htcondor(make_pool, world):
    make_pool(machine("n1"), machine("n2"))
    site = write_site(world.path, provider='memory = "1 GB"')
    # test_batch_site_suite runs all promises. These depend on the batch system.
    page = prove(site, world.home, "-k", "test_start or test_pairs or test_walltime")
    assert len(page["promises"]) == 7, page
    assert {each["verdict"] for each in page["promises"]} == {"holds"}, page
