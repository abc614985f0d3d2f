"""`python -m benchmarks.papers.schedmate WHAT`: evaluate SchedMate's failure handler on a labelled corpus.

`failures` evaluates the shipped handler. `train` makes the shipped scorer. `validate` holds out each type of the
training part in turn.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness import side_options
from benchmarks.papers.schedmate.failures import evaluation

if __name__ == "__main__":
    whats: dict[str, Callable[[], object]] = {
        "failures": evaluation.evaluate, "train": evaluation.train, "validate": evaluation.validate
    }  # fmt: skip
    whats[side_options(__doc__, what=tuple(whats)).what]()
