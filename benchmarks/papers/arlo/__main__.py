"""`python -m benchmarks.papers.arlo --table 6a`: run Arlo's evaluation table by table, and write the page.

`--table 6a` runs what a figure needs and writes the page anew; `--table all` runs everything.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.papers.arlo import report
from benchmarks.papers.arlo.records import Records
from benchmarks.papers.arlo.tables import TABLES
from benchmarks.papers.arlo.workload import missing
from benchmarks.papers.common import exit_status, say
from stoker.whole_files import draft_of

PAGE, RECORDS = "arlo.md", "arlo.json"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when something fails, 2 where the data is not there or what cannot be asked, 130 after
    Ctrl-C."""
    asked = _asked(arguments)
    return exit_status(
        lambda: _reproduce(asked),
        what="Arlo's evaluation", kept=asked.out / RECORDS, missing=missing(), skip=asked.skip,
    )  # fmt: skip


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.arlo", description=__doc__)
    ask.add_argument("--table", choices=[*TABLES, "all"], default="all", help="what to run [%(default)s]")
    ask.add_argument("--out", type=Path, default=Path("docs/reproduction"), help="for page and records [%(default)s]")
    ask.add_argument("--skip", action="store_true", help="exit with 0 where the data is not there")
    return ask.parse_args(arguments)


def _reproduce(asked: argparse.Namespace) -> int:
    records = Records(asked.out / RECORDS)

    every = [case for cases in TABLES.values() for case in cases()]
    records.bring(every if asked.table == "all" else TABLES[asked.table](), tell=say)
    if asked.table in ("all", "measured"):
        records.measure(tell=say)
    if asked.table in ("all", "deployed"):
        records.compare_deployed(tell=say)
    records.drop_others(every)
    asked.out.mkdir(parents=True, exist_ok=True)
    with draft_of(asked.out / PAGE) as draft:
        draft.write_text(report.write(records))
    sys.stdout.write(f"{asked.out / PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
