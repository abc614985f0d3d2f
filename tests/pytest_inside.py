"""Run pytest inside a test, with the configuration of this suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
RUN_S = 240.0
"""Maximum seconds of a run on a busy machine, including the restart of a lost worker."""


def write_suite(folder: Path, tests: dict[str, str]) -> Path:
    """Write a folder with the suite configuration and `tests` (text by file name); return the folder."""
    (folder / "tests").mkdir()
    for path in [*TESTS.glob("suite_*.py"), TESTS / "conftest.py", TESTS / "file_seconds.json"]:
        shutil.copy(path, folder / "tests")
    shutil.copy(TESTS.parent / "pyproject.toml", folder)
    for name, text in tests.items():
        (folder / "tests" / name).write_text(text)
    return folder


def run_pytest(folder: Path, *options: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder of `write_suite`. `before`: words before the command."""
    command = [*before, sys.executable, "-m", "pytest", *options]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["STOKER_SNAPSHOTS"] = str(folder)
    said, complained = folder / "stdout", folder / "stderr"
    with said.open("w") as out, complained.open("w") as errors:  # a leftover process would keep a pipe open
        try:
            ran = subprocess.run(
                command, cwd=folder, stdout=out, stderr=errors, timeout=RUN_S, env=environ, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{said.read_text()}\n{complained.read_text()}") from error
    return subprocess.CompletedProcess(command, ran.returncode, said.read_text(), complained.read_text())
