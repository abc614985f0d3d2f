from __future__ import annotations

import json
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
    # condor_rm of an unknown cluster exits with 0 until the schedd has counted its new jobs
    said = until(lambda: (said := new_pool.run("condor_rm", "999")).returncode and said, what="a count of jobs")
    assert (said.returncode, said.stderr) == (1, "\nCouldn't find/remove all jobs in cluster 999\n")
    said = new_pool.run("condor_hold", "2.1")
    assert said.stdout == "Job 2.1 held\n"
    new_pool.wait("2.1", 5)
    said = new_pool.run("condor_hold", "2.1")
    assert (said.returncode, said.stderr) == (1, "\nJob 2.1 already held\n")
    said = new_pool.run("condor_release", "2.1")
    assert said.stdout == "Job 2.1 released\n"
    said = new_pool.run("condor_rm", "-constraint", "ClusterId > 1")
    assert said.stdout == "All jobs matching constraint (ClusterId > 1) have been marked for removal\n"
    for name in ("2.1", "3.0"):
        new_pool.wait(name, 3)
