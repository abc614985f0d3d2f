"""`python -m benchmarks.papers.schedmate.scheduling`: run SchedMate's scheduling on Philly, and write the page and its
figure.

A case that this release has run is not run again, and a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.papers.common import exit_status, say
from benchmarks.papers.schedmate.scheduling import drawing, report, simulate
from benchmarks.papers.schedmate.scheduling.records import Records
from benchmarks.papers.schedmate.scheduling.trace import missing
from stoker.whole_files import draft_of

PAGE, RECORDS = "schedmate.md", "schedmate.json"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when something fails, 2 where the data is not there or what cannot be asked, 130 after
    Ctrl-C."""
    asked = _asked(arguments)
    return exit_status(
        lambda: _reproduce(asked),
        what="SchedMate's scheduling", kept=asked.out / RECORDS, missing=missing(), skip=asked.skip,
    )  # fmt: skip


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.schedmate.scheduling", description=__doc__)
    ask.add_argument("--out", type=Path, default=Path("docs/reproduction"), help="for page and records [%(default)s]")
    ask.add_argument("--jobs", type=int, default=2, help="processes [%(default)s]")
    ask.add_argument("--skip", action="store_true", help="exit with 0 where the data is not there")
    return ask.parse_args(arguments)


def _reproduce(asked: argparse.Namespace) -> int:
    records, cases = Records(asked.out / RECORDS), simulate.cases()
    asked.out.mkdir(parents=True, exist_ok=True)
    records.drop_others(cases)
    records.bring(cases, jobs=asked.jobs, tell=say)
    records.keep_summary(report.summary(records))
    drawing.draw(asked.out, records)
    with draft_of(asked.out / PAGE) as draft:
        draft.write_text(report.write(records))
    sys.stdout.write(f"{asked.out / PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
