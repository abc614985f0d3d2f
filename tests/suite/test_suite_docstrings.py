from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / ".ci" / "check_docstrings.py"
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


def check(folder: Path, source: str) -> tuple[int, str]:
    package = folder / "thing"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "errors.py").write_text('class WrongSizeError(ValueError):\n    """A size that no box has."""\n')
    done = subprocess.run([sys.executable, str(CHECK), str(package)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_complete_docstrings_pass(tmp_path: Path) -> None:
    assert check(tmp_path, SOUND) == (0, "3 public functions and classes: every docstring has its sections\n")


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
    code, printed = check(tmp_path, SOUND.replace(complete, faulty))
    assert code == 1
    assert said in printed
    assert "__init__.py:" in printed
