from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from driver.machine import Machine

SITE = """
[provider]
kind = "local"
[pilot]
devices = "gpu+cpu:1"
gpu_cores = 1
probe = "never"
"""
PROGRAM = """
import json, os, subprocess, sys
import stoker

@stoker.context(device_memory="4 GB")
def model():
    return os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0)), stoker.device()

@stoker.context(memory="1 GB", kinds=["cpu"])
def tables():
    return os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0)), stoker.device()

@stoker.app(context=model())
def on_gpu(seen):
    return seen

@stoker.app(context=tables())
def on_cores(seen):
    return seen

with stoker.load("site.toml") as session:
    seen = on_gpu().result(), on_cores().result()
    command = [sys.executable, "-m", "stoker.manager.cli.entry", "status", session.id]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    print(json.dumps([*seen, shown]))
"""

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core leaves no spare core for a GPU pilot"
)


def run(folder: Path, *command: str) -> str:
    machine = Machine(folder, {}).environment
    environment = {**os.environ, **machine, "CUDA_VISIBLE_DEVICES": "0", "STOKER_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpu_and_cpu_contexts_are_hot_on_one_pilot(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE)
    (tmp_path / "program.py").write_text(PROGRAM)
    on_gpu, on_cores, shown = json.loads(run(tmp_path, "program.py").splitlines()[-1])
    assert (on_gpu[0], on_gpu[2]) == ("GPU-0", "cuda:0")
    assert (on_cores[0], on_cores[2]) == ("", "cpu")
    assert len(on_gpu[1]) == 1
    assert not set(on_gpu[1]) & set(on_cores[1])
    assert "1 here (1 NVIDIA A10, 1 cpu)" in shown
    assert "cuda:0 NVIDIA A10" in shown
    assert "cpu:0" in shown


def test_doctor_shows_the_devices_that_a_pilot_offers(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE)
    said = json.loads(run(tmp_path, "-m", "stoker.manager.cli.entry", "doctor", "site.toml", "--json"))
    texts = [finding["text"] for finding in said["findings"]]
    [text] = [text for text in texts if "pilots on this machine, each with" in text]
    assert "1 x NVIDIA A10 with 24.0 GB, 1 x cpu with" in text
    assert "spare core" in text


def test_dry_run_shows_the_device_settings_in_the_pilot_command(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE)
    shown = run(tmp_path, "-m", "stoker.manager.cli.entry", "up", "site.toml", "--dry-run")
    assert "--devices gpu+cpu:1" in shown
    assert "--gpu-cores 1" in shown
