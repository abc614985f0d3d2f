from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any


def run_python(code: str, *arguments: object, timeout: float = 120, **options: Any) -> str:
    """Run a program in a new process, and return its output. Raises AssertionError if the program fails."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
