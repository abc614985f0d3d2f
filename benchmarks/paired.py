"""Two sides measured in turn (A B A B ...), each in a fresh process, so that a machine that drifts does so for both.

A side is a command whose last line of output is a JSON object of numbers.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def machine() -> str:
    """The machine, in a line."""
    model = "unknown processor"
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} cores, {model}, Python {platform.python_version()}"


def run_side(module: str, *arguments: str, timeout_s: float = 900.0) -> dict[str, Any]:
    """Run `python -m module arguments` in a fresh process; its last line as a dict. Raises RuntimeError with its output."""
    command = [sys.executable, "-m", module, *arguments]
    scripts = os.path.dirname(sys.executable)  # Parsl starts its own scripts by name
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ.get("PATH", "")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode})\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def spread(numbers: Sequence[float], *, digits: int = 0) -> str:
    """`median (min-max)`."""
    return f"{statistics.median(numbers):,.{digits}f} ({min(numbers):,.{digits}f}-{max(numbers):,.{digits}f})"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """A/B, pair by pair."""
    return [a / b for a, b in zip(above, below, strict=True)]
