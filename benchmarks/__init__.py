"""Compare Stoker with other systems. `python -m benchmarks --help` lists the benchmarks."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)  # Experiments use Slurm and the small model of the tests.
