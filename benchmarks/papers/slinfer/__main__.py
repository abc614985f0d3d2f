"""`python -m benchmarks.papers.slinfer`: run SLINFER's evaluation and write its page. `--table III` runs one table."""

from __future__ import annotations

import argparse
import sys

from benchmarks.papers import common
from benchmarks.papers.slinfer import report
from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, records, run
from benchmarks.papers.slinfer.tables import QUICK_S, TABLES
from benchmarks.papers.slinfer.worlds import missing

PAGE, RECORDS = "slinfer.md", "slinfer.json"


def main(arguments: list[str] | None = None) -> int:
    return common.reproduce(
        "slinfer", PAGE, __doc__, _reproduce, arguments, missing=missing(), table={"choices": [*TABLES, "all"]},
        only={"action": "append", "choices": [*BASELINES, SLINFER], "help": "of a table; repeat for several"},
        out={}, quick={}, skip={},
    )  # fmt: skip


def _reproduce(asked: argparse.Namespace) -> str:
    store, for_s = records(asked.out / RECORDS), QUICK_S if asked.quick else 0.0
    tables = {name: [report.shorten_case(case, for_s) for case in cases()] for name, cases in TABLES.items()}
    every = [case for cases in tables.values() for case in cases]
    store.drop_others(every)
    wanted = every if asked.table == "all" else tables[asked.table]
    store.bring([case for case in wanted if not asked.only or case.system in asked.only], run)
    return report.write(store, for_s=for_s)


if __name__ == "__main__":
    sys.exit(main())
