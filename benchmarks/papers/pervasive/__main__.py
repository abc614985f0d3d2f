"""`python -m benchmarks.papers.pervasive`: fit, predict, and write the page, its plots and the scenarios."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.harness import Clock
from benchmarks.papers import common
from benchmarks.papers.pervasive import drawing, fit, paper, predict, report, scenario_files
from benchmarks.papers.pervasive.fit import Fit
from benchmarks.papers.pervasive.predict import Found

PAGE, PARAMETERS, RECORD = "context-paper.md", "context-paper-parameters.json", "context-paper.json"
_STARTS_PER_FIT, _QUICK_STARTS = 5, 4
_FEWEST = paper.RUNS[0].batch
"""Inferences per call in a quick run, because smaller sizes need 150,000 calls."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class Kept(msgspec.Struct, frozen=True):
    """The parameter file, most central set first. `starts`: number of searches."""

    starts: int
    fits: tuple[Fit, ...]
    searched: str = fit.FIRST_SEARCHED


def main(arguments: list[str] | None = None) -> int:
    ask = common.options(
        "pervasive", __doc__,
        fits={"type": common.number_parser(most=500), "default": 24, "help": "parameter sets to predict with [24]"},
        jobs=None, out=None,
        keep_fits={"action": "store_true", "help": f"predict with the sets in {PARAMETERS}, and do not search"},
        page_only=None, quick=None,
    )  # fmt: skip
    asked = common.parse_options(ask, arguments)
    if asked.quick and asked.keep_fits:
        ask.error("--quick and --keep-fits exclude each other; give one")
    asked.kept = _read_parameter_sets(ask, asked.out / PARAMETERS) if asked.keep_fits else None
    again = f"; --keep-fits continues with {asked.out / PARAMETERS}" if (asked.out / PARAMETERS).exists() else ""
    return common.exit_status(lambda: _reproduce(asked), stopped=f"the page is unchanged{again}")


def _read_parameter_sets(ask: argparse.ArgumentParser, path: Path) -> Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except OSError as error:
        ask.error(f"--keep-fits: {path} cannot be read ({error.strerror}); leave --keep-fits out to search for sets")
    except msgspec.DecodeError as error:
        ask.error(f"--keep-fits: {path} has no parameter sets: {error}")


def _reproduce(asked: argparse.Namespace) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.page_only:
        clock = Clock("python -m benchmarks.papers.pervasive" + (" --keep-fits" if asked.keep_fits else ""))
        kept: Kept = asked.kept or _search_parameter_sets(asked)
        if not kept.fits:
            common.say(f"none of {kept.starts} searches found a set with all errors under {fit.CLOSE:.0%}")
            return 1
        text = msgspec.json.format(msgspec.json.encode(kept), indent=1)
        common.write_bytes(asked.out / PARAMETERS, text + b"\n")  # Write the parameters before the first prediction.
        write_record(asked.out / RECORD, _predict(asked, kept, clock))
    common.write_page(asked.out / PAGE, report.write(read_record(asked.out / RECORD)))
    return 0


def _predict(asked: argparse.Namespace, kept: Kept, clock: Clock) -> Found:
    first, every = kept.fits[0].parameters, [each.parameters for each in kept.fits]
    runs = [run for run in paper.RUNS if run.batch >= _FEWEST or not asked.quick]
    simulated = _run_all(
        "Figures 6 and 7", functools.partial(predict.simulate_static_run, first), runs, jobs=asked.jobs
    )
    predict_one = predict.quick_predictions if asked.quick else predict.all_predictions
    predicted = tuple(map(tuple, _run_all("Figures 8 and 9", predict_one, every, jobs=asked.jobs)))
    shared = tuple(_run_all("neighbours", predict.simulate_shared_disks, every, jobs=asked.jobs))
    together = tuple(zip(runs, simulated, strict=True))
    found = Found(clock.facts(), kept.starts, kept.fits, together, predicted, shared, kept.searched, panels=True)
    drawing.draw_figures(asked.out, found.fits, found.simulated, found.predictions)
    if not asked.quick:
        for name, content in scenario_files.scenario_texts(first).items():
            (scenario_files.FOLDER / name).write_text(content)
    return found


def write_record(path: Path, found: Found) -> None:
    common.write_parts(path, msgspec.to_builtins(found.without_looks()))


def read_record(path: Path) -> Found:
    return msgspec.json.decode(path.read_bytes(), type=Found)


def _search_parameter_sets(asked: argparse.Namespace) -> Kept:
    count, starts = (1, _QUICK_STARTS) if asked.quick else (asked.fits, _STARTS_PER_FIT * asked.fits)
    starts = max(starts, _QUICK_STARTS)
    found = [each for some in _run_all("searches", fit.search, range(starts), jobs=asked.jobs) for each in some]
    return Kept(starts, fit.choose_fits(found, count), time.strftime("%Y-%m-%d"))


def _run_all(what: str, do: Callable[[_T], _R], todo: Sequence[_T], *, jobs: int) -> list[_R]:
    tell, found = common.progress_printer(what), {}
    for number, (place, result) in enumerate(common.run_tasks(do, todo, jobs=jobs), 1):
        found[place] = result
        tell(number, len(todo))
    return [found[place] for place in range(len(todo))]


if __name__ == "__main__":
    sys.exit(main())
