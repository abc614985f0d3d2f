"""Measure Stoker against its peers. `python -m benchmarks --help` lists the benchmarks."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)  # Experiments use the tests' Slurm and small model.
