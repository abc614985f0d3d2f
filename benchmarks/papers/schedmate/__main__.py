"""`python -m benchmarks.papers.schedmate WHAT`: evaluate SchedMate's failure handler on a labelled corpus.

`failures` evaluates the shipped handler. `train` makes the shipped scorer.
"""

from __future__ import annotations

from benchmarks.harness import side_options
from benchmarks.papers.schedmate.failures import evaluation

if __name__ == "__main__":
    whats = {"failures": evaluation.evaluate, "train": evaluation.train}
    whats[side_options(__doc__, what=tuple(whats)).what]()
