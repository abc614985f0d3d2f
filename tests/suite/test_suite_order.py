from __future__ import annotations

import json
from pathlib import Path

import pytest
from pytest_inside import TESTS, run_pytest, write_suite

TEST = """
import time, pathlib

def test_it():
    time.sleep(pathlib.Path("sleep-NAME").exists() * 6)
    with open("order", "a") as file:
        file.write("NAME")
"""


@pytest.fixture
def suite(tmp_path):
    folder = write_suite(tmp_path, {f"test_{name}.py": TEST.replace("NAME", name) for name in "abc"})
    (folder / "tests" / "file_seconds.json").write_text('{"test_b.py": 30, "test_gone.py": 9}')
    return folder


def run(suite: Path, *options: str) -> str:
    (suite / "order").unlink(missing_ok=True)
    ran = run_pytest(suite, "-p", "no:randomly", *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return (suite / "order").read_text()


@pytest.mark.long
def test_slowest_test_file_of_the_last_run_starts_first(suite):
    workers = ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    (suite / "sleep-c").touch()
    assert run(suite, *workers) == "bac", "as the shipped file says"
    (suite / "sleep-c").unlink()
    assert run(suite) == "cab", "as the last run went: b was quick"


def test_every_test_file_with_a_recorded_time_exists():
    kept = json.loads((TESTS / "file_seconds.json").read_text())
    assert kept
    assert [name for name in kept if not (TESTS / name).exists()] == []
