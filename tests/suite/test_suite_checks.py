"""The checks of `make check` find each kind of fault, and cover every file."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stoker

ROOT = Path(__file__).resolve().parents[2]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def check(name: str, folder: Path) -> tuple[int, str]:
    """Run a check of `.ci` on a package; return its exit status and its output."""
    command = [sys.executable, str(ROOT / ".ci" / f"{name}.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


# ---- docstrings


SOUND = '''"""A package."""

from thing.errors import WrongSizeError

__all__ = ["Box", "fill"]
_MODULES = ["errors"]


class Box:
    """A box. Raises WrongSizeError where it is too small.

    Args:
        size: Edge in metres.

    Raises:
        WrongSizeError: The size is negative.
    """

    def __init__(self, size: float) -> None:
        if size < 0:
            raise WrongSizeError


def fill(box: Box, *, count: int) -> int:
    """Put things into a box.

    Args:
        box: The box.
        count: Number of things.

    Returns:
        Number of things that fit.
    """
    return count
'''


def documented(folder: Path, source: str) -> tuple[int, str]:
    package = folder / "thing"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "errors.py").write_text('class WrongSizeError(ValueError):\n    """A size that no box has."""\n')
    return check("check_docstrings", package)


def test_complete_docstrings_pass(tmp_path: Path) -> None:
    assert documented(tmp_path, SOUND) == (0, "3 public functions and classes: every docstring has its sections\n")


@pytest.mark.parametrize(
    ("complete", "faulty", "said"),
    [
        ("        count: Number of things.\n", "", "fill: Args: lacks count"),
        (
            "        box: The box.\n",
            "        box: The box.\n        lid: Its lid.\n",
            "fill: Args: names lid, which is",
        ),
        ("    Returns:\n        Number of things that fit.\n", "", "fill: Returns: is missing"),
        ("        WrongSizeError: The size is negative.\n", "", "Box.__init__: Raises: lacks WrongSizeError"),
        ("        size: Edge in metres.\n", "", "Box.__init__: Args: lacks size"),
        ('class Box:\n    """', 'class Box:\n    box = """', "Box: no docstring"),
    ],
)
def test_docstring_fault_is_reported_with_its_line(tmp_path: Path, complete: str, faulty: str, said: str) -> None:
    assert SOUND.count(complete) == 1
    code, printed = documented(tmp_path, SOUND.replace(complete, faulty))
    assert code == 1
    assert said in printed
    assert "__init__.py:" in printed


# ---- imports and types


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "thing"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "low.py").write_text("import os\n")
    (folder / "high.py").write_text("from thing import low\n\n\ndef f() -> None:\n    import torch\n")
    return folder


def test_package_without_a_cycle_passes(package: Path) -> None:
    said = "3 files: no import cycle, and no import inside a function without a reason\n"
    assert check("check_imports", package) == (0, said)


def test_import_for_type_checking_counts_in_an_import_cycle(package: Path) -> None:
    (package / "low.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from thing.middle import g\n"
    )
    (package / "middle.py").write_text("from thing.high import f as g\n")
    code, said = check("check_imports", package)
    assert (code, said) == (1, "3 files import in a circle: thing.high, thing.low, thing.middle\n")


def test_function_level_import_requires_a_reason(package: Path) -> None:
    (package / "low.py").write_text("def f() -> None:\n    import json\n\n    from thing import high\n")
    code, said = check("check_imports", package)
    assert code == 1
    assert "low.py:2: a function of thing.low imports json" in said
    assert "low.py:4: a function of thing.low imports thing.high" in said


def test_applications_may_import_only_the_public_modules():
    contract = next(one for one in TOOLS["importlinter"]["contracts"] if one.get("source_modules") == ["stoker.apps"])
    forbidden = {one.removeprefix("stoker.") for one in contract["forbidden_modules"]}
    there = {one.name for one in pkgutil.iter_modules([str(ROOT / "src" / "stoker")])} - {"apps"}
    private = (there - set(stoker._MODULES)) | {f"{one}.*" for one in ("contexts", "tuning")}
    assert forbidden == private, (
        f"pyproject.toml, contract {contract['name']!r}: forbid {sorted(private - forbidden)} to applications (a module"
        f" that is to be public stands in stoker._MODULES), and drop {sorted(forbidden - private)}"
    )


def test_mypy_checks_scripts_of_ci_and_programs_of_make() -> None:
    scripts = {path.stem for path in (ROOT / ".ci").glob("*.py")}
    programs = set(re.findall(r"PYTHONPATH=tests .* -m (\S+)", (ROOT / "Makefile").read_text()))
    assert scripts
    assert programs
    assert scripts | programs <= set(TOOLS["mypy"]["modules"])


# ---- the tests themselves

SLOW = {"torch", "transformers", "peft"}


def slow_imports(source: str) -> list[int]:
    """Return the lines with slow top-level imports, including `importorskip`."""
    found = []
    for statement in ast.parse(source).body:
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
        call = getattr(statement, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("importorskip"):
            names += [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        if any(name.partition(".")[0] in SLOW for name in names):
            found.append(statement.lineno)
    return found


def test_no_file_of_tests_imports_pytorch_before_a_test_runs() -> None:
    """Each worker collects all test files, so tests use `lazily` to import PyTorch on first use."""
    lines = slow_imports('import torch\nx = pytest.importorskip("peft", reason="")\nfrom transformers import A')
    assert lines == [1, 2, 3]
    assert slow_imports('torch = lazily("torch")\ndef f():\n    import torch') == []
    texts = {str(file): file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py")}
    named = {file: text for file, text in texts.items() if any(name in text for name in SLOW)}
    found = {file: lines for file, text in named.items() if (lines := slow_imports(text))}
    assert found == {}
