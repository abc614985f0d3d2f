"""Every kind of object that a program may hold travels from a script and from a module, or is refused in words."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
_IMPORTED = "import json, {module}, sent_elsewhere; print(json.dumps(sent_elsewhere.outcomes(vars({module}))))"
_NAMES = [
    (module, name)
    for module in ("objects_that_travel", "classes_that_travel", "wrappers_that_travel")
    for name in re.findall(r"^ *def ((?:use|make|refuse)_\w+)", (_FOLDER / f"{module}.py").read_text(), re.MULTILINE)
]


@functools.cache
def all_outcomes(module: str, *, in_a_script: bool) -> dict[str, str]:
    command = [f"{module}.py"] if in_a_script else ["-c", _IMPORTED.replace("{module}", module)]
    done = subprocess.run(
        [sys.executable, *command], cwd=_FOLDER, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def outcome_of(module: str, name: str, *, in_a_script: bool) -> str:
    outcome = all_outcomes(module, in_a_script=in_a_script).get(name)
    if outcome is None:
        pytest.skip("its library is not installed")
    return outcome


@pytest.mark.parametrize(("module", "name"), _NAMES)
def test_a_kind_of_object_travels_from_a_script(module: str, name: str) -> None:
    outcome = outcome_of(module, name, in_a_script=True)
    if name.startswith("refuse"):
        assert "the function can't be sent to a library at global" in outcome
    else:
        assert outcome == "ok"


@pytest.mark.parametrize(("module", "name"), _NAMES)
def test_a_kind_of_object_travels_from_a_module_beside_the_script(module: str, name: str) -> None:
    assert outcome_of(module, name, in_a_script=False) == "ok"
