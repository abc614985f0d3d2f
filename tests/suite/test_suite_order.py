from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in (
        "conftest.py",
        "suite_compiling.py",
        "suite_guard.py",
        "suite_limits.py",
        "suite_long.py",
        "suite_order.py",
    ):
        shutil.copy(TESTS / name, tmp_path / "tests")
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "file_seconds.json").write_text('{"test_b.py": 30, "test_gone.py": 9}')
    for name in "abc":
        (tmp_path / "tests" / f"test_{name}.py").write_text(
            "import time, pathlib\n"
            "def test_it():\n"
            f"    time.sleep(pathlib.Path('sleep-{name}').exists() * 6)\n"
            f"    with open('order', 'a') as file: file.write('{name}')\n"
        )
    return tmp_path


def run(suite: Path, *options: str) -> str:
    (suite / "order").unlink(missing_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["STOKER_SNAPSHOTS"] = str(suite)
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", *options]
    ran = subprocess.run(command, cwd=suite, capture_output=True, text=True, timeout=240, env=environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return (suite / "order").read_text()


def test_the_longest_file_of_the_last_run_begins(suite):
    workers = ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    (suite / "sleep-c").touch()
    assert run(suite, *workers) == "bac", "as the shipped file says"
    (suite / "sleep-c").unlink()
    assert run(suite, *workers) == "cab", "as the last run went: b was quick"
    assert run(suite) == "abc", "each is quick now"


@pytest.mark.long
def test_what_files_take_is_written_for_those_who_never_ran_them(suite):
    (suite / "sleep-c").touch()
    run(suite, "--write-seconds")
    kept = json.loads((suite / "tests" / "file_seconds.json").read_text())
    assert list(kept) == ["test_c.py"]
    assert kept["test_c.py"] > 5


def test_every_file_that_is_shipped_is_there():
    kept = json.loads((TESTS / "file_seconds.json").read_text())
    assert kept
    assert [name for name in kept if not (TESTS / name).exists()] == []
