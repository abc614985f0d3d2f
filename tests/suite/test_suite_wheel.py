"""What is installed: a wheel has the product, and none of the papers' evaluations and baselines."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("src", "apps", "contexts", "manager", "pilot", "site-configs")
OUTSIDE = ("reproduce", "benchmarks", "pervasive/", "infless", "elastic_flow", "scattered", "forgetful")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of a wheel that is made of a copy of the sources."""
    there = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, there / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, there)
    command = [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('out')"]
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [wheel] = (there / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist()


def test_it_has_the_product(names: list[str]) -> None:
    for name in (
        "manager/policies/prompt_tuner/scheduling.py",
        "manager/study/scenarios/awareness.toml",
        "pilot/main.py",
    ):
        assert f"stoker/{name}" in names


def test_it_has_no_evaluation_of_a_paper_and_no_baseline(names: list[str]) -> None:
    assert not [name for name in names if any(each in name for each in OUTSIDE)]
