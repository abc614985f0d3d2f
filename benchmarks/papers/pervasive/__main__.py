"""`python -m benchmarks.papers.pervasive`: fit, predict, and write the page, its plots and the scenarios."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.harness import Clock
from benchmarks.papers.common import number, progress
from benchmarks.papers.pervasive import drawing, fit, paper, predict, report, scenario_files
from benchmarks.papers.pervasive.fit import Fit
from benchmarks.papers.pervasive.found import Found
from benchmarks.papers.pervasive.parameters import Parameters
from stoker.errors import StokerError

PAGE, PARAMETERS, RECORD = "context-paper.md", "context-paper-parameters.json", "context-paper.json"
_STARTS_PER_FIT, _QUICK_STARTS = 5, 4
_FEWEST = paper.RUNS[0].batch
"""A short run leaves out calls of fewer inferences: there are 150,000 of them."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class Kept(msgspec.Struct, frozen=True):
    """The file of parameters. `starts`: how many searches they came from, on the day `searched`; the first of them is
    the most central."""

    starts: int
    fits: tuple[Fit, ...]
    searched: str = fit.FIRST_SEARCHED


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when nothing explains the figures or something fails, 2 for what cannot be asked, 130
    after Ctrl-C."""
    asked = _asked(arguments)
    try:
        return _reproduce(asked)
    except StokerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        again = f"; --keep-fits goes on with {asked.out / PARAMETERS}" if (asked.out / PARAMETERS).exists() else ""
        sys.stderr.write(f"\nstopped: the page is as it was{again}\n")
        return 130


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.pervasive", description=__doc__)
    ask.add_argument("--fits", type=number(most=500), default=24, help="parameter sets to predict with [24]")
    ask.add_argument("--jobs", type=number(most=1000), default=os.cpu_count() or 1, help="processes [all cores]")
    ask.add_argument("--out", type=Path, help="where page, plots and parameters go [docs/reproduction]")
    ask.add_argument("--keep-fits", action="store_true", help=f"predict with the sets in {PARAMETERS}, do not search")
    ask.add_argument("--page-only", action="store_true", help="write the page anew from the record that is there")
    ask.add_argument("--quick", action="store_true", help="one set and few variants, for a look; wants --out")
    asked = ask.parse_args(arguments)
    if asked.quick and asked.out is None:
        ask.error("--quick wants --out: what it writes must not replace the whole page")
    if asked.quick and asked.keep_fits:
        ask.error("--quick searches a set of its own; leave out one of --quick and --keep-fits")
    asked.out = asked.out or Path("docs/reproduction")
    if asked.out.exists() and not asked.out.is_dir():
        ask.error(f"--out {asked.out}: not a folder")
    asked.kept = _kept(ask, asked.out / PARAMETERS) if asked.keep_fits else None
    return asked


def _kept(ask: argparse.ArgumentParser, path: Path) -> Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except OSError as error:
        ask.error(f"--keep-fits: {path} cannot be read ({error.strerror}); leave it out, and sets are searched for")
    except msgspec.DecodeError as error:
        ask.error(f"--keep-fits: {path} holds no parameter sets: {error}")


def _reproduce(asked: argparse.Namespace) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.page_only:
        (asked.out / PAGE).write_text(report.write(read(asked.out / RECORD)))
        return 0
    clock = Clock("python -m benchmarks.papers.pervasive" + (" --keep-fits" if asked.keep_fits else ""))
    kept: Kept = asked.kept or _search(asked)
    if not kept.fits:
        sys.stderr.write(f"none of {kept.starts} searches found a set with all errors under {fit.CLOSE:.0%}\n")
        return 1
    text = msgspec.json.format(msgspec.json.encode(kept), indent=1)
    (asked.out / PARAMETERS).write_bytes(text + b"\n")  # before anything is predicted
    first = kept.fits[0].parameters
    runs = [run for run in paper.RUNS if run.batch >= _FEWEST or not asked.quick]
    simulated = list(_each("Figures 6 and 7", functools.partial(_static, first), runs, jobs=asked.jobs))
    predict_one = predict.a_look if asked.quick else predict.everything
    every = [each.parameters for each in kept.fits]
    predicted = [tuple(row) for row in _each("Figures 8 and 9", predict_one, every, jobs=asked.jobs)]
    shared = list(_each("neighbours", predict.simulate, every, jobs=asked.jobs))
    found = Found(
        facts=clock.facts(),
        starts=kept.starts,
        fits=kept.fits,
        simulated=tuple(zip(runs, simulated, strict=True)),
        predictions=tuple(predicted),
        shared=tuple(shared),
        searched=kept.searched,
        panels=True,
    )
    drawing.draw(asked.out, found.fits, found.simulated, found.predictions)
    keep(asked.out / RECORD, found)
    (asked.out / PAGE).write_text(report.write(read(asked.out / RECORD)))
    if not asked.quick:
        for name, content in scenario_files.texts(first).items():
            (scenario_files.FOLDER / name).write_text(content)
    sys.stdout.write(f"{asked.out / PAGE}\n")
    return 0


def keep(path: Path, found: Found) -> None:
    parts = msgspec.to_builtins(found.without_looks())
    lines = [f'"{name}": {msgspec.json.encode(part).decode()}' for name, part in parts.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path) -> Found:
    return msgspec.json.decode(path.read_bytes(), type=Found)


def _search(asked: argparse.Namespace) -> Kept:
    count, starts = (1, _QUICK_STARTS) if asked.quick else (asked.fits, _STARTS_PER_FIT * asked.fits)
    starts = max(starts, _QUICK_STARTS)
    found = [each for some in _each("searches", fit.search, range(starts), jobs=asked.jobs) for each in some]
    return Kept(starts, fit.chosen(found, count), time.strftime("%Y-%m-%d"))


def _static(parameters: Parameters, run: paper.Run) -> float:
    return predict.static(parameters, run)


def _each(what: str, do: Callable[[_T], _R], over: Iterable[_T], *, jobs: int) -> Iterator[_R]:
    todo, tell = list(over), progress(what)
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(do, todo) if jobs > 1 else map(do, todo)
        for number, result in enumerate(results, 1):
            tell(number, len(todo))
            yield result


if __name__ == "__main__":
    sys.exit(main())
