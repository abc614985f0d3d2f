"""`python -m benchmarks.papers.prompt_tuner`: run PromptTuner's evaluation; write the page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from benchmarks.harness import Clock
from benchmarks.papers import common
from benchmarks.papers.prompt_tuner import report
from benchmarks.papers.prompt_tuner.grid import Grid, read_grid
from benchmarks.papers.prompt_tuner.record import Record, read_record, write_record
from benchmarks.papers.prompt_tuner.searching import Runs, book_of, judged_runs, search

PAGE = "prompttuner.md"
QUICK_SMALLER = 4


def quick(grid: Grid) -> Grid:
    """Return a grid with one set and few seeds."""
    asked = msgspec.structs.replace(grid.search, looked_at=1, finalists=1, more_seeds=(), tuning_seeds=(1,))
    judge = msgspec.structs.replace(grid.judge, seeds=grid.judge.seeds[:2], parts=2, few=1)
    return msgspec.structs.replace(grid, draws=1, search=asked, judge=judge)


def main(arguments: list[str] | None = None) -> int:
    ask = common.options(
        "prompt_tuner", __doc__, jobs=None, out=None,
        runs={"type": Path, "default": Path("runs/reproduce-tuner"), "help": "folder for runs [%(default)s]"},
        page_only=None, quick=None,
    )  # fmt: skip
    asked = common.parse_options(ask, arguments)
    if asked.runs.exists() and not asked.runs.is_dir():
        ask.error(f"--runs {asked.runs}: not a folder")
    stopped = f"the page is unchanged; the same command continues {asked.runs}"
    return common.exit_status(lambda: _reproduce(asked), stopped=stopped)


def _reproduce(asked: argparse.Namespace) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / report.RECORD
    if not asked.page_only:
        write_record(path, evaluate(Runs(asked.runs, jobs=asked.jobs), look=asked.quick))
    record = read_record(path)
    common.write_page(asked.out / PAGE, report.write(record))
    return 0


def evaluate(runs: Runs, *, look: bool) -> Record:
    clock, grid = Clock("python -m benchmarks.papers.prompt_tuner"), read_grid()
    grid = quick(grid) if look else grid
    book = book_of(runs, grid, tell=common.progress_printer("runs"), smaller=QUICK_SMALLER if look else 1)
    book.bring(judged_runs(search(book), grid))
    return Record(clock.facts(), grid, tuple(sorted(book.kept.values(), key=lambda run: run.name)))


if __name__ == "__main__":
    sys.exit(main())
