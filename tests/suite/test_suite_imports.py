from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / ".ci" / "check_imports.py"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "thing"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "low.py").write_text("import os\n")
    (folder / "high.py").write_text("from thing import low\n\n\ndef f() -> None:\n    import torch\n")
    return folder


def check(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(CHECK), str(folder)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_package_without_a_cycle_passes(package: Path) -> None:
    assert check(package) == (0, "3 files: no import cycle, and no import inside a function without a reason\n")


def test_import_for_type_checking_counts_in_an_import_cycle(package: Path) -> None:
    (package / "low.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from thing.middle import g\n"
    )
    (package / "middle.py").write_text("from thing.high import f as g\n")
    code, said = check(package)
    assert (code, said) == (1, "3 files import in a circle: thing.high, thing.low, thing.middle\n")


def test_function_level_import_requires_a_reason(package: Path) -> None:
    (package / "low.py").write_text("def f() -> None:\n    import json\n\n    from thing import high\n")
    code, said = check(package)
    assert code == 1
    assert "low.py:2: a function of thing.low imports json" in said
    assert "low.py:4: a function of thing.low imports thing.high" in said


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
