from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batch.lab.shape import Shape
from batch.sessions import write_site

pytestmark = pytest.mark.long

NOT_TRIED = {
    "the memory ledger agrees with NVML within 5 %",
    "too much device memory is a clear error, and the device recovers",
}
"""Checks that need a GPU."""


@pytest.mark.slow
def test_doctor_tests_of_a_site_pass_on_slurm(make_cluster, world):
    make_cluster(Shape(gpus=("", "")))
    scratch = world.path / "nodes"
    own = f"export STOKER_SCRATCH={scratch}/$SLURMD_NODENAME; mkdir -p $STOKER_SCRATCH"
    job = {"worker_init": own, "cores": 2, "memory": "3 GB", "options": ["--exclusive"]}
    site = write_site(world.path, provider=job, pilot={"devices": "cpu:2"})
    page = prove(site, world.home)
    verdicts = {each["title"]: each["verdict"] for each in page["promises"]}
    assert {title for title, verdict in verdicts.items() if verdict != "holds"} == NOT_TRIED, page
    assert set(verdicts.values()) == {"holds", "not tried"}, page
    left = subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert left.split() == []


def prove(site: Path, home: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "stoker.manager.cli.entry", "doctor", str(site), "--tests", "--json", *options]
    done = subprocess.run(
        command,
        cwd=site.parent,
        env={**os.environ, "STOKER_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.stdout, done.stderr
    [page] = json.loads(done.stdout)["sites"]
    return page
