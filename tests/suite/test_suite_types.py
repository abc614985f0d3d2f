from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def test_mypy_checks_whole_packages_strictly() -> None:
    assert MYPY["packages"] == ["stoker", "benchmarks"]
    assert MYPY["strict"]
    assert not MYPY.get("exclude")
    assert not any("ignore_errors" in each for each in MYPY["overrides"])


def test_mypy_checks_scripts_of_ci_and_programs_of_make() -> None:
    scripts = {path.stem for path in (ROOT / ".ci").glob("*.py")}
    programs = set(re.findall(r"PYTHONPATH=tests .* -m (\S+)", (ROOT / "Makefile").read_text()))
    assert scripts
    assert programs
    assert scripts | programs <= set(MYPY["modules"])
