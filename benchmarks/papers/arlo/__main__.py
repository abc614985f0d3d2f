"""`python -m benchmarks.papers.arlo --table 6a`: run the cases of a table or figure and write the page."""

from __future__ import annotations

import sys

from benchmarks.papers import common
from benchmarks.papers.arlo import report
from benchmarks.papers.arlo.cases import run
from benchmarks.papers.arlo.measured import Records
from benchmarks.papers.arlo.tables import TABLES
from benchmarks.papers.arlo.workload import missing

PAGE, RECORDS = "arlo.md", "arlo.json"


def main(arguments: list[str] | None = None) -> int:
    table = {"choices": [*TABLES, "all"], "default": "all", "help": "what to run [%(default)s]"}
    asked = common.parse_options(common.options("arlo", __doc__, table=table, out=None, skip=None), arguments)

    def evaluate() -> int:
        records, every = Records(asked.out / RECORDS), [case for cases in TABLES.values() for case in cases()]
        records.store.bring(every if asked.table == "all" else TABLES[asked.table](), run, tell=common.say)
        if asked.table in ("all", "measured"):
            records.measure(tell=common.say)
        if asked.table in ("all", "deployed"):
            records.compare_deployed(tell=common.say)
        records.store.drop_others(every)
        common.write_page(asked.out / PAGE, report.write(records))
        return 0

    stopped = f"the same again goes on with {asked.out / RECORDS}"
    return common.exit_status(evaluate, stopped=stopped, missing=missing(), skip=asked.skip)


if __name__ == "__main__":
    sys.exit(main())
