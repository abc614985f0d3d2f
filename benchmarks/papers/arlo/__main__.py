"""`python -m benchmarks.papers.arlo --table 6a`: run the cases of a table or figure and write the page."""

from __future__ import annotations

import argparse
import sys

from benchmarks.papers import common
from benchmarks.papers.arlo import measured, report
from benchmarks.papers.arlo.cases import run
from benchmarks.papers.arlo.tables import TABLES
from benchmarks.papers.arlo.workload import missing

PAGE, RECORDS = "arlo.md", "arlo.json"


def main(arguments: list[str] | None = None) -> int:
    return common.reproduce(
        "arlo", PAGE, __doc__, _reproduce, arguments, missing=missing(), table={"choices": [*TABLES, "all"]},
        out={}, skip={},
    )  # fmt: skip


def _reproduce(asked: argparse.Namespace) -> str:
    records, every = measured.records(asked.out / RECORDS), [case for cases in TABLES.values() for case in cases()]
    records.bring(every if asked.table == "all" else TABLES[asked.table](), run)
    if asked.table in ("all", "measured"):
        measured.measure(records)
    if asked.table in ("all", "deployed"):
        measured.compare_deployed(records)
    records.drop_others(every)
    return report.write(records)


if __name__ == "__main__":
    sys.exit(main())
