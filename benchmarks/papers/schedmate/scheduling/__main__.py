"""`python -m benchmarks.papers.schedmate.scheduling`: simulate SchedMate on Philly jobs; write page and figure.

A stopped run continues.
"""

from __future__ import annotations

import sys

from benchmarks.papers import common
from benchmarks.papers.schedmate.scheduling import report, simulate
from benchmarks.papers.schedmate.scheduling.records import Records
from benchmarks.papers.schedmate.scheduling.trace import missing

PAGE, RECORDS = "schedmate.md", "schedmate.json"


def main(arguments: list[str] | None = None) -> int:
    jobs = {"type": int, "default": 2, "help": "processes [%(default)s]"}
    ask = common.options("schedmate.scheduling", __doc__, out=None, jobs=jobs, skip=None)
    asked = common.parse_options(ask, arguments)

    def evaluate() -> int:
        records, cases = Records(asked.out / RECORDS), simulate.cases()
        asked.out.mkdir(parents=True, exist_ok=True)
        records.store.drop_others(cases)
        records.bring(cases, jobs=asked.jobs, tell=common.say)
        records.keep_summary(report.summary(records))
        report.draw(asked.out, records)
        common.write_page(asked.out / PAGE, report.write(records))
        return 0

    stopped = f"the same again goes on with {asked.out / RECORDS}"
    return common.exit_status(evaluate, stopped=stopped, missing=missing(), skip=asked.skip)


if __name__ == "__main__":
    sys.exit(main())
