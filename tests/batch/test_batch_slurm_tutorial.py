from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs.pages import ROOT
from docs.test_docs_tutorial import walk
from faults.world import World

pytestmark = pytest.mark.long


def test_tutorial_steps_work_on_slurm(slurm, world: World, monkeypatch) -> None:
    world.environ["PYTHONPATH"] = str(ROOT / "tests" / "driver")  # stand-in driver for the GPUs of the nodes
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")

    def run(command: str) -> subprocess.CompletedProcess[str]:
        process = world.spawn(["sh", "-c", command], folder=world.path, PYTHONUNBUFFERED="1")
        out, _ = process.communicate(timeout=180)
        return subprocess.CompletedProcess(command, process.returncode, out)

    walk(world.path, run)
    assert slurm.queue() == []
    assert world.left() == []
