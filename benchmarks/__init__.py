"""Measures Stoker against its peers, in one run on one machine. `python -m benchmarks --help` lists the benchmarks."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)  # experiments use the tests' Slurm and their small model
