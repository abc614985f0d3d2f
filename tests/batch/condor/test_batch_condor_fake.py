from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live.peers import until

if TYPE_CHECKING:
    from batch.condor.pool import Pool


@pytest.fixture
def new_pool(make_pool: Callable[..., Pool]) -> Pool:
    from batch.condor.machines import machine

    return make_pool(machine("n1"))


def write(folder: Path, text: str) -> str:
    (folder / "job.sub").write_text(text)
    return "job.sub"


SLEEP = "executable = /bin/sleep\narguments = 300\n"


def test_fake_condor_submit_and_condor_q_print_real_formats(new_pool: Pool, tmp_path: Path) -> None:
    sub = write(tmp_path, f'{SLEEP}+Colour = "red"\nqueue 3\n')
    said = new_pool.run("condor_submit", sub, cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, "Submitting job(s)...\n3 job(s) submitted to cluster 1.\n")
    said = new_pool.run("condor_submit", "-terse", sub, cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, "2.0 - 2.2\n")
    said = new_pool.run("condor_submit", "-dry-run", "ads", sub, cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, "Dry-Run job(s)...\n3 job(s) dry-run to cluster 1.\n")
    assert '\nColour="red"\n' in (tmp_path / "ads").read_text()

    said = new_pool.run("condor_q", "-json", "-attributes", "ClusterId,ProcId,Colour", "-constraint", 'Colour == "red"')
    assert said.stdout.startswith("[\n{\n")
    assert "\n}\n,\n{\n" in said.stdout
    assert said.stdout.endswith("\n}\n]\n")
    assert [(ad["ClusterId"], ad["ProcId"]) for ad in json.loads(said.stdout)] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    assert new_pool.run("condor_q", "2", "-af:j", "Colour", "Nothing").stdout == "".join(
        f"2.{n} red undefined\n" for n in range(3)
    )
    said = new_pool.run("condor_q", "-json", "-constraint", "ClusterId == 9")
    assert (said.returncode, said.stdout) == (0, "")
    said = new_pool.run("condor_history", "9.0", "-json")
    assert (said.returncode, said.stdout) == (0, "[\n]\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("executable = no-such-program\nqueue\n", "Can't access executable file no-such-program: No such file"),
        (f"{SLEEP}nonsense\nqueue\n", r"Failed to parse command file \(line 3\)"),
        (f"{SLEEP}universe = none\nqueue\n", "(?i)universe"),
        (f"{SLEEP}+Colour = (\nqueue\n", "Colour"),
        (f"{SLEEP}requirements = Memory >\nqueue\n", "(?i)requirements"),
    ],
)
def test_fake_condor_refuses_what_htcondor_refuses(pool: Pool, tmp_path: Path, text: str, error: str) -> None:
    said = pool.run("condor_submit", write(tmp_path, text), cwd=tmp_path)
    assert said.returncode == 1
    assert "ERROR: " in said.stderr
    assert re.search(error, said.stderr), said.stderr
    assert pool.queued() == []


def test_fake_condor_rm_and_related_commands_print_real_formats(new_pool: Pool, tmp_path: Path) -> None:
    sub = write(tmp_path, f"{SLEEP}queue 3\n")
    for _ in range(3):
        new_pool.run("condor_submit", sub, cwd=tmp_path)
    said = new_pool.run("condor_rm", "1")
    assert (said.returncode, said.stdout) == (0, "All jobs in cluster 1 have been marked for removal\n")
    said = new_pool.run("condor_rm", "2.2", "999.0")
    assert (said.returncode, said.stdout, said.stderr) == (0, "Job 2.2 marked for removal\n", "Job 999.0 not found\n")
    said = new_pool.run("condor_rm", "999.0")
    assert (said.returncode, said.stderr) == (1, "\nJob 999.0 not found\n")
    # a schedd that has not counted its new jobs yet reports none, with exit code 0
    said = until(lambda: (said := new_pool.run("condor_rm", "999")).returncode and said, what="a count of jobs")
    assert (said.returncode, said.stderr) == (1, "\nCouldn't find/remove all jobs in cluster 999\n")
    said = new_pool.run("condor_hold", "2.1")
    assert said.stdout == "Job 2.1 held\n"
    new_pool.wait("2.1", 5)
    said = new_pool.run("condor_hold", "2.1")
    assert (said.returncode, said.stderr) == (1, "\nJob 2.1 already held\n")
    said = new_pool.run("condor_vacate_job", "-fast", "2.1")
    assert (said.returncode, said.stderr) == (1, "\nJob 2.1 not running to be fast-vacated\n")
    said = new_pool.run("condor_release", "2.1")
    assert said.stdout == "Job 2.1 released\n"
    said = new_pool.run("condor_rm", "-constraint", "ClusterId > 1")
    assert said.stdout == "All jobs matching constraint (ClusterId > 1) have been marked for removal\n"
    for name in ("2.1", "3.0"):
        new_pool.wait(name, 3)


def test_fake_commands_fail_without_a_schedd(new_pool: Pool, tmp_path: Path) -> None:
    sub = write(tmp_path, f"{SLEEP}queue\n")
    new_pool.stop_schedd()
    said = new_pool.run("condor_submit", sub, cwd=tmp_path)
    nobody = r"Failed to connect to <127\.0\.0\.1:\d+\?.*>"
    assert said.returncode == 1
    assert re.fullmatch(rf"\nERROR: Failed to connect to local queue manager\nCEDAR:6001:{nobody}\n", said.stderr)
    said = new_pool.run("condor_q", "-json")
    assert said.returncode == 1
    assert re.fullmatch(rf"\n-- Failed to fetch ads from: <.*> : \S+\n\nCEDAR:6001:{nobody}\n", said.stderr)
    said = new_pool.run("condor_rm", "1.0")
    words = "DCSchedd::actOnJobs:6001:Failed to connect to schedd\nNo result found for job 1.0\n"
    assert (said.returncode, said.stderr) == (1, words)


def test_fake_job_outlives_its_schedd_and_ends_with_its_processes(new_pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\nsetsid sleep 300 &\nsleep 300\n")
    (tmp_path / "job.sh").chmod(0o755)
    new_pool.run("condor_submit", write(tmp_path, "executable = job.sh\nqueue\n"), cwd=tmp_path)
    new_pool.wait("1.0", 2)
    processes = until(lambda: len(found := new_pool.processes("1.0")) == 3 and found, what="three processes")
    new_pool.stop_schedd()
    new_pool.start_schedd()
    assert new_pool.status("1.0") == 2
    assert all(process.is_running() for process in processes)
    new_pool.run("condor_rm", "1.0")
    until(lambda: new_pool.queued() == [], what="the job leaving")
    running = [process for process in processes if process.is_running() and process.status() != "zombie"]
    assert not running, "an ended process may still be a zombie"
