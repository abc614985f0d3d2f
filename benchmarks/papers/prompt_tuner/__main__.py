"""`python -m benchmarks.papers.prompt_tuner`: run PromptTuner's evaluation; write the page."""

from __future__ import annotations

import argparse
import sys

import msgspec

from benchmarks.harness import Clock
from benchmarks.papers import common
from benchmarks.papers.prompt_tuner import report
from benchmarks.papers.prompt_tuner.scenarios import Grid, read_grid
from benchmarks.papers.prompt_tuner.searching import Record, book_of, judged_runs, read_record, runs_in, search

PAGE = "prompttuner.md"
QUICK_SMALLER = 4


def quick(grid: Grid) -> Grid:
    """Return a grid with one parameter set and few seeds."""
    asked = msgspec.structs.replace(grid.search, looked_at=1, finalists=1, more_seeds=(), tuning_seeds=(1,))
    judge = msgspec.structs.replace(grid.judge, seeds=grid.judge.seeds[:2], parts=2, few=1)
    return msgspec.structs.replace(grid, draws=1, search=asked, judge=judge)


def main(arguments: list[str] | None = None) -> int:
    runs = {"type": common.folder, "default": "runs/reproduce-tuner", "help": "folder for runs [%(default)s]"}
    return common.reproduce(
        "prompt_tuner", PAGE, __doc__, _reproduce, arguments, jobs={}, out={}, runs=runs, page_only={}, quick={}
    )


def _reproduce(asked: argparse.Namespace) -> str:
    path = asked.out / report.RECORD
    if not asked.page_only:
        clock, grid = Clock("python -m benchmarks.papers.prompt_tuner"), read_grid()
        grid = quick(grid) if asked.quick else grid
        book = book_of(runs_in(asked.runs), grid, jobs=asked.jobs, smaller=QUICK_SMALLER if asked.quick else 1)
        book.bring(judged_runs(search(book), grid))
        runs = sorted(book.kept.values(), key=lambda run: run.name)
        common.write_record(path, Record(clock.facts(), grid, tuple(runs)))
    return report.write(read_record(path))


if __name__ == "__main__":
    sys.exit(main())
