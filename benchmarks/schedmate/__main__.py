"""`python -m benchmarks.schedmate failures | train | record`: SchedMate's failure handler, on a labelled corpus.

`failures` evaluates what ships and writes a record; `train` makes the scorer that ships; `record` runs the programs
anew.
"""

from __future__ import annotations

import argparse

from benchmarks.schedmate.failures import evaluation, recording, training


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.schedmate", description=__doc__)
    ask.add_argument("what", choices=["failures", "train", "record"])
    {"failures": evaluation.evaluate, "train": training.train, "record": recording.record}[ask.parse_args().what]()


if __name__ == "__main__":
    main()
