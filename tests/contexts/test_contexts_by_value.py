"""Every kind of object that a program may hold travels from a script and from a module, or is refused in words."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_FILE = Path(__file__).with_name("kinds_that_travel.py")
_IMPORTED = "import json, kinds_that_travel; print(json.dumps(kinds_that_travel.outcomes()))"
_NAMES = re.findall(r"^ *def ((?:use|make|refuse)_\w+)", _FILE.read_text(), re.MULTILINE)


@functools.cache
def all_outcomes(*, in_a_script: bool) -> dict[str, str]:
    command = [str(_FILE)] if in_a_script else ["-c", _IMPORTED]
    done = subprocess.run(
        [sys.executable, *command], cwd=_FILE.parent, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def outcome_of(name: str, *, in_a_script: bool) -> str:
    outcome = all_outcomes(in_a_script=in_a_script).get(name)
    if outcome is None:
        pytest.skip("its library is not installed")
    return outcome


@pytest.mark.parametrize("name", _NAMES)
def test_a_kind_of_object_travels_from_a_script(name: str) -> None:
    outcome = outcome_of(name, in_a_script=True)
    if name.startswith("refuse"):
        assert "the function can't be sent to a library at global" in outcome
    else:
        assert outcome == "ok"


@pytest.mark.parametrize("name", _NAMES)
def test_a_kind_of_object_travels_from_a_module_beside_the_script(name: str) -> None:
    assert outcome_of(name, in_a_script=False) == "ok"
