"""`python -m benchmarks.papers.prompt_tuner`: run PromptTuner's evaluation; write the page and its plots."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.papers import common
from benchmarks.papers.prompt_tuner import drawing, report
from benchmarks.papers.prompt_tuner.everything import RunSelection, again, evaluate, whole
from benchmarks.papers.prompt_tuner.grid import every_choice, read_grid
from benchmarks.papers.prompt_tuner.record import keep, read
from benchmarks.papers.prompt_tuner.scenarios import ELASTIC_FLOW, INFLESS
from benchmarks.papers.prompt_tuner.searching import Runs, Searched

PAGE = "prompttuner.md"
LOOK = RunSelection((1, 2), (1, 2), (1, 2), tuning=(1000,), smaller=4)
"""One set without a search, two seeds, a quarter of the cluster and jobs."""


def main(arguments: list[str] | None = None) -> int:
    most = common.number(most=1000)
    ask = common.options(
        "prompt_tuner", __doc__, jobs=None, out=None,
        runs={"type": Path, "default": Path("runs/reproduce-tuner"), "help": "folder for runs [%(default)s]"},
        seeds={"type": most, "default": 0, "help": "seeds of the most central set [all]"},
        stages={"type": common.number(most=9), "default": 0, "help": "stages of the search, for an early page [all]"},
        sets={"type": most, "default": 0, "help": "parameter sets that count [as the grid says]"},
        page_only=None,
        again={
            "metavar": "BASELINE", "choices": (INFLESS, ELASTIC_FLOW),
            "help": "search its settings and repeat its runs; keep the other runs of the record",
        },
        quick=None,
    )  # fmt: skip
    asked = common.parsed(ask, arguments)
    if asked.runs.exists() and not asked.runs.is_dir():
        ask.error(f"--runs {asked.runs}: not a folder")
    stopped = f"the page is unchanged; the same command continues {asked.runs}"
    return common.exit_status(lambda: _reproduce(asked), stopped=stopped)


def _reproduce(asked: argparse.Namespace) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    path, grid = asked.out / report.RECORD, read_grid()
    command, runs = "python -m benchmarks.papers.prompt_tuner", Runs(asked.runs, jobs=asked.jobs)
    if asked.again:
        command += f" --again {asked.again}"
        keep(path, again(runs, grid, read(path), baseline=asked.again, tell=common.progress, command=command))
    elif not asked.page_only:
        limits = {"seeds": asked.seeds, "stages": asked.stages, "sets": asked.sets}
        command = " ".join([command, *(f"--{name} {limit}" for name, limit in limits.items() if limit)])
        extent, found = whole(grid, **limits), None
        if asked.quick:
            extent, found = LOOK, Searched((), grid.anchors.within, (every_choice(grid)[0],))
        keep(path, evaluate(runs, grid, extent=extent, tell=common.progress, command=command, found=found))
    record = read(path)
    drawing.draw(asked.out, record)
    common.write_page(asked.out / PAGE, report.write(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
