"""`python -m benchmarks.papers.schedmate.scheduling`: simulate SchedMate on Philly jobs; write page and figure.

A stopped run continues.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.papers import common
from benchmarks.papers.schedmate.scheduling import report, simulate
from benchmarks.papers.schedmate.scheduling.simulate import missing

PAGE, RECORDS = "schedmate.md", "schedmate.json"


def main(arguments: list[str] | None = None) -> int:
    return common.reproduce(
        "schedmate.scheduling", PAGE, __doc__, _reproduce, arguments, missing=missing(), out={}, jobs={}, skip={}
    )


def _reproduce(asked: argparse.Namespace) -> str:
    store, cases = simulate.records(asked.out / RECORDS), simulate.cases()
    store.drop_others(cases)
    simulate.bring(store, cases, jobs=asked.jobs)
    store.write()
    report.draw(asked.out, store)
    return report.write(store)


if __name__ == "__main__":
    sys.exit(main())
