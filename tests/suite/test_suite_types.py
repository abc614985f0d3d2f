from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def test_mypy_checks_scripts_of_ci_and_programs_of_make() -> None:
    scripts = {path.stem for path in (ROOT / ".ci").glob("*.py")}
    programs = set(re.findall(r"PYTHONPATH=tests .* -m (\S+)", (ROOT / "Makefile").read_text()))
    assert scripts
    assert programs
    assert scripts | programs <= set(MYPY["modules"])
