"""docs/notebooks.md keeps its promises: its program runs, and it names what exists."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import stoker
from stoker.contexts import hub
from stoker.manager.executor.loading import Session

TEXT = (Path(__file__).parents[2] / "docs" / "notebooks.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_program_over_a_table_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[0])
    environment = {**os.environ, "STOKER_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(1, 3), (0, 5)]"


def test_the_options_that_it_names_exist() -> None:
    for option in re.findall(r"stoker\.map\(verify, claims, (\w+)=", TEXT):
        assert option in inspect.signature(stoker.map).parameters
    assert list(inspect.signature(Session.warm).parameters) == ["self", "context", "count"]
    assert f"({hub.ANSWER_S} seconds in a library" in TEXT
