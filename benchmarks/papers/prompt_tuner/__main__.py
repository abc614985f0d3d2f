"""`python -m benchmarks.papers.prompt_tuner`: run PromptTuner's evaluation, and write the page and its plots."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.papers.common import number, progress
from benchmarks.papers.prompt_tuner import drawing, report
from benchmarks.papers.prompt_tuner.cases import ELASTIC_FLOW, INFLESS
from benchmarks.papers.prompt_tuner.everything import Extent, again, evaluate, whole
from benchmarks.papers.prompt_tuner.grid import every_choice, read_grid
from benchmarks.papers.prompt_tuner.record import keep, read
from benchmarks.papers.prompt_tuner.runs import Runs
from benchmarks.papers.prompt_tuner.search import Searched
from stoker.errors import StokerError
from stoker.whole_files import draft_of

PAGE = "prompttuner.md"
LOOK = Extent((1, 2), (1, 2), (1, 2), tuning=(1000,), smaller=4)
"""For a look: one set that nobody searched for, two seeds, and a quarter of cluster and jobs."""


def main(arguments: list[str] | None = None) -> int:
    asked = _asked(arguments)
    try:
        return _reproduce(asked)
    except StokerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped: the page is as it was; the same again goes on with {asked.runs}\n")
        return 130


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.prompt_tuner", description=__doc__)
    ask.add_argument("--jobs", type=number(most=1000), default=os.cpu_count() or 1, help="processes [all cores]")
    ask.add_argument("--out", type=Path, help="where page and plots go [docs/reproduction]")
    ask.add_argument(
        "--runs", type=Path, default=Path("runs/reproduce-tuner"), help="where runs are kept [%(default)s]"
    )
    ask.add_argument("--seeds", type=number(most=1000), default=0, help="of the most central set, so many [all]")
    ask.add_argument("--stages", type=number(most=9), default=0, help="of the search, so many: an early page [all]")
    ask.add_argument(
        "--sets", type=number(most=1000), default=0, help="of those that count, so many [as the grid says]"
    )
    ask.add_argument("--page-only", action="store_true", help="write the page anew from the record that is there")
    ask.add_argument(
        "--again", metavar="BASELINE", choices=(INFLESS, ELASTIC_FLOW),
        help="search its settings and do its runs again; the others of the record stay",
    )  # fmt: skip
    ask.add_argument(
        "--quick", action="store_true", help="two seeds and a quarter of cluster and jobs, for a look; wants --out"
    )
    asked = ask.parse_args(arguments)
    if asked.quick and asked.out is None:
        ask.error("--quick wants --out: what it writes must not replace the whole page")
    asked.out = asked.out or Path("docs/reproduction")
    for name in ("out", "runs"):
        folder = getattr(asked, name)
        if folder.exists() and not folder.is_dir():
            ask.error(f"--{name} {folder}: not a folder")
    return asked


def _reproduce(asked: argparse.Namespace) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    path, grid = asked.out / report.RECORD, read_grid()
    if asked.again:
        runs, command = (
            Runs(asked.runs, jobs=asked.jobs),
            f"python -m benchmarks.papers.prompt_tuner --again {asked.again}",
        )
        keep(path, again(runs, grid, read(path), baseline=asked.again, tell=progress, command=command))
    elif not asked.page_only:
        runs = Runs(asked.runs, jobs=asked.jobs)
        if asked.quick:
            extent, found = LOOK, Searched((), grid.anchors.within, (every_choice(grid)[0],))
        else:
            extent, found = whole(grid, seeds=asked.seeds, stages=asked.stages, sets=asked.sets), None
        limits = {"seeds": asked.seeds, "stages": asked.stages, "sets": asked.sets}
        command = " ".join(
            [
                "python -m benchmarks.papers.prompt_tuner",
                *(f"--{name} {limit}" for name, limit in limits.items() if limit),
            ]
        )
        keep(path, evaluate(runs, grid, extent=extent, tell=progress, command=command, found=found))
    record = read(path)
    drawing.draw(asked.out, record)
    with draft_of(asked.out / PAGE) as draft:
        draft.write_text(report.write(record))
    sys.stdout.write(f"{asked.out / PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
