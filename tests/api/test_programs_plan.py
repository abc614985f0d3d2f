from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import sys
import time

import stoker
from stoker import app, context


@context(memory="300 MB")
def slowly():
    time.sleep(1.0)
    return 1


@app(context=slowly())
def nap(one, seconds):
    time.sleep(seconds)
    return seconds


if __name__ == "__main__":
    with stoker.load("here.toml", progress=False):
        began = time.monotonic()
        naps = list(stoker.map(nap, [0.05 + 0.1 * (number % 4) / 3 for number in range(int(sys.argv[1]))]))
        print(time.monotonic() - began)
"""
SITE = 'name = "here"\n[pilot]\ndevices = "cpu:2"\n'


def took_s(folder: Path, inputs: int) -> float:
    command = [sys.executable, "program.py", str(inputs)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=True)
    return float(done.stdout)


def planned(folder: Path, inputs: int) -> dict[str, Any]:
    plan = ["plan", "here.toml", "program.py:nap", "--inputs", str(inputs)]
    command = [sys.executable, "-m", "stoker.manager.cli.main", *plan]
    done = subprocess.run([*command, "--json"], cwd=folder, capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_plan_forecast_contains_the_real_run_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "here.toml").write_text(SITE)
    said = []
    for home in ("first", "second", "third"):  # three tries, because other users of the cores change the times
        monkeypatch.setenv("STOKER_HOME", str(tmp_path / home))
        for _ in range(2):
            took_s(tmp_path, 30)
        finish = planned(tmp_path, 90)["as_written"]["finish_s"]
        really_s = took_s(tmp_path, 90)
        busy = 1.0 + max(0.0, os.getloadavg()[0] - 2.0) / 2.0  # processes start more slowly on a busy machine
        said.append((finish, really_s))
        says_something = finish["p90"] <= 1.6 * finish["p10"]
        if says_something and 0.9 * finish["p10"] <= really_s <= 1.1 * busy * finish["p90"] + 1.0:
            return
    pytest.fail(f"no plan held what came: {said}")
