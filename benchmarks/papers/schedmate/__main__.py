"""`python -m benchmarks.papers.schedmate WHAT`: evaluate SchedMate's failure handler on a labelled corpus.

`failures` evaluates the shipped handler. `train` makes the shipped scorer. `validate` holds out each type of the
training part in turn. `record` runs the programs again. `record-clusters` runs the jobs on a real Slurm and Open MPI
(half an hour, root; `--mpi-python` has mpi4py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks.papers.schedmate.failures import clusters, evaluation, recording


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.schedmate", description=__doc__)
    ask.add_argument("what", choices=["failures", "train", "validate", "record", "record-clusters"])
    ask.add_argument("--mpi-python", default=sys.executable, help="a Python that has mpi4py (for record-clusters)")
    asked = ask.parse_args()
    whats: dict[str, Callable[[], object]] = {
        "failures": evaluation.evaluate, "train": evaluation.train, "validate": evaluation.validate,
        "record": recording.record, "record-clusters": lambda: clusters.record(asked.mpi_python),
    }  # fmt: skip
    whats[asked.what]()


if __name__ == "__main__":
    main()
