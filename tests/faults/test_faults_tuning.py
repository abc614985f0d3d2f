from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults.world import World, kill, until

from stoker.apps.prompt_tuning.board import CHECKPOINT, read_board

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "peft")),
        reason="needs torch, transformers and peft",
    ),
]

LIMIT_S = 300.0
SITE = """
[provider]
kind = "local"
[pilot]
devices = "cpu:2"
[policy]
name = "prompt-tuner"
"""
JOB = """
name = "{name}"
model = "model"
[data]
path = "pairs.jsonl"
[prompt]
initial = "{initial}"
[until]
metric = "loss"
iterations = {iterations}
evaluate_every = 20
slo = "{slo}"
[training]
batch = 8
learning_rate = 0.05
checkpoint_every = "200 ms"
"""
JOBS = {
    "early": {"slo": "8 min", "iterations": 300, "initial": "say yes or no"},
    "ample": {"slo": "20 min", "iterations": 60, "initial": ""},
    "hurry": {"slo": "1 s", "iterations": 40, "initial": "yes"},
}


@pytest.fixture
def place(world: World) -> Path:
    from tuning import tiny

    tiny.put_into(world.path)
    (world.path / "site.toml").write_text(SITE)
    for name, job in JOBS.items():
        (world.path / f"{name}.toml").write_text(JOB.format(name=name, **job))
    return world.path


def stoker(place: Path, *arguments: str) -> str:
    return subprocess.run(command(*arguments), cwd=place, capture_output=True, text=True, check=True).stdout


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stoker.manager.cli.main", *arguments]


def test_killed_pilot_loses_only_steps_since_a_checkpoint(world: World, place: Path) -> None:
    files = [f"{name}.toml" for name in JOBS]
    submitter = world.spawn(command("tune", "submit", *files, "--site", "site.toml", "--gang", "1-2"), folder=place)

    def under_way() -> bool:
        assert submitter.poll() is None, submitter.communicate()
        jobs = {one.entry.name: one for one in read_board(place / "runs")}
        return (
            "early" in jobs and jobs["early"].entry.iteration > 0 and (Path(jobs["early"].folder) / CHECKPOINT).exists()
        )

    until(under_way, limit_s=LIMIT_S, why="a job iterates, and has left a checkpoint")
    kill([world.pilot()])
    assert "3 tuning jobs: " in stoker(place, "tune", "status")
    said, trouble = submitter.communicate(timeout=LIMIT_S)
    assert submitter.returncode == 0, said + trouble

    report = stoker(place, "tune", "report")
    assert report.splitlines()[0] == "3 tuning jobs · 2 of 3 deadlines met"
    jobs = {job["job"]["name"]: job for job in json.loads(stoker(place, "tune", "report", "--json"))["jobs"]}
    assert {name: job["in_time"] for name, job in jobs.items()} == {"early": True, "ample": True, "hurry": False}
    for name, job in jobs.items():
        check_result(place / job["folder"], job, iterations=int(str(JOBS[name]["iterations"])))
    assert jobs["ample"]["result"]["initial_from"].startswith("the bank (loss ")
    assert jobs["early"]["job"]["restarts"] == 1, "jobs of the killed pilot were started again"
    assert "was started again 1 time, from its last checkpoint" in report
    assert "late: it had 1.0 s" in report
    assert re.search(r"hurry (is late|cannot meet its deadline)", said), said


def check_result(folder: Path, job: dict[str, Any], *, iterations: int) -> None:
    """Check that the prompt file and its PEFT version exist, that each evaluation ran once, and that the report
    shows the time of each part.
    """
    import safetensors.torch

    assert job["job"]["phase"] == "done"
    assert job["result"]["iterations"] == iterations
    [vectors] = safetensors.torch.load_file(folder / "adapter_model.safetensors").values()
    assert vectors.shape[1] == 32
    points = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [point["iteration"] for point in points] == list(range(0, iterations + 1, 20))
    assert points[-1]["loss"] < points[0]["loss"]
    assert not (folder / CHECKPOINT).exists()
    assert re.search(rf"waited .* for devices.*; ran .*\b{iterations} iterations of ", job["why"]), job["why"]
