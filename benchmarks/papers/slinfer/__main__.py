"""`python -m benchmarks.papers.slinfer`: run SLINFER's evaluation and write its page. `--table III` runs one table."""

from __future__ import annotations

import argparse
import sys

from benchmarks.papers import common
from benchmarks.papers.slinfer import report
from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, records, run
from benchmarks.papers.slinfer.data import missing
from benchmarks.papers.slinfer.tables import QUICK_S, TABLES

PAGE, RECORDS = "slinfer.md", "slinfer.json"


def main(arguments: list[str] | None = None) -> int:
    ask = common.options(
        "slinfer", __doc__,
        table={"choices": [*TABLES, "all"], "default": "all", "help": "what to run [%(default)s]"},
        only={"action": "append", "choices": [*BASELINES, SLINFER], "help": "of a table; repeat for several"},
        out=None, quick=None, skip=None,
    )  # fmt: skip
    asked = common.parse_options(ask, arguments)
    return common.exit_status(
        lambda: _reproduce(asked), stopped=f"the same again goes on with {asked.out / RECORDS}", missing=missing(),
        skip=asked.skip,
    )  # fmt: skip


def _reproduce(asked: argparse.Namespace) -> int:
    store, for_s = records(asked.out / RECORDS), QUICK_S if asked.quick else 0.0
    every = [report.shorten_case(case, for_s) for cases in TABLES.values() for case in cases()]
    store.drop_others(every)
    wanted = every if asked.table == "all" else [report.shorten_case(case, for_s) for case in TABLES[asked.table]()]
    cases = [case for case in wanted if not asked.only or case.system in asked.only]
    store.bring(cases, run, tell=common.say)
    common.write_page(asked.out / PAGE, report.write(store, for_s=for_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
