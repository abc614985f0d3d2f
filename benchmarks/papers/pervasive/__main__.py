"""`python -m benchmarks.papers.pervasive`: fit, predict, and write the page, its plots and the scenarios."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from itertools import chain
from pathlib import Path

import msgspec

from benchmarks.harness import Clock, commit
from benchmarks.papers import common
from benchmarks.papers.pervasive import drawing, fit, paper, predict, report
from benchmarks.papers.pervasive.fit import Fit
from benchmarks.papers.pervasive.predict import Found

PAGE, PARAMETERS, RECORD = "context-paper.md", "context-paper-parameters.json", "context-paper.json"
SETS = 24
_FEWEST = paper.RUNS[0].batch
"""Inferences per call in a quick run, because smaller sizes need 150,000 calls."""


class Kept(msgspec.Struct, frozen=True):
    """The parameter file, most central set first. `starts`: number of searches. `searched`, `repeated`: dates of the
    searches.
    """

    starts: int
    fits: tuple[Fit, ...]
    searched: str
    repeated: str = ""


def main(arguments: list[str] | None = None) -> int:
    return common.reproduce(
        "pervasive", PAGE, __doc__, _reproduce, arguments, check=_check,
        jobs={}, out={},
        keep_fits={"action": "store_true", "help": f"predict with the sets in {PARAMETERS}, and do not search"},
        page_only={}, quick={},
    )  # fmt: skip


def _check(ask: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    if asked.quick and asked.keep_fits:
        ask.error("--quick and --keep-fits exclude each other; give one")
    path, asked.kept = asked.out / PARAMETERS, None
    try:
        if asked.keep_fits:
            asked.kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        ask.error(f"--keep-fits: {path} cannot be read ({error}); leave --keep-fits out to search for sets")


def _reproduce(asked: argparse.Namespace) -> str:
    if not asked.page_only:
        clock = Clock("python -m benchmarks.papers.pervasive" + (" --keep-fits" if asked.keep_fits else ""))
        kept = asked.kept
        if kept is None:
            starts, count = (4, 1) if asked.quick else (5 * SETS, SETS)
            found = chain.from_iterable(common.run_all("searches", fit.search, range(starts), jobs=asked.jobs))
            when = f"{time.strftime('%Y-%m-%d')} by commit {commit()}"
            kept = Kept(starts, fit.choose_fits(list(found), count), when)
        if not kept.fits:
            raise ValueError(f"none of {kept.starts} searches found a set with all errors under {fit.CLOSE:.0%}")
        text = msgspec.json.format(msgspec.json.encode(kept), indent=1)
        common.write_bytes(asked.out / PARAMETERS, text + b"\n")  # Write the parameters before the first prediction.
        common.write_record(asked.out / RECORD, _predict(asked, kept, clock).without_looks())
    return report.write(read_record(asked.out / RECORD))


def _predict(asked: argparse.Namespace, kept: Kept, clock: Clock) -> Found:
    first, every = kept.fits[0].parameters, [each.parameters for each in kept.fits]
    runs = [run for run in paper.RUNS if run.batch >= _FEWEST or not asked.quick]
    simulate = functools.partial(predict.simulate_static_run, first)
    simulated = tuple(zip(runs, common.run_all("Figures 6 and 7", simulate, runs, jobs=asked.jobs), strict=True))
    predict_one = functools.partial(predict.predictions, quick=asked.quick)
    predicted = tuple(map(tuple, common.run_all("Figures 8 and 9", predict_one, every, jobs=asked.jobs)))
    shared = tuple(common.run_all("neighbours", predict.simulate_shared_disks, every, jobs=asked.jobs))
    found = Found(clock.facts(), kept.starts, kept.fits, simulated, predicted, shared, kept.searched, kept.repeated)
    drawing.draw_figures(asked.out, found.fits, found.simulated, found.predictions)
    if not asked.quick:
        for name, content in predict.scenario_texts(first).items():
            (predict.FOLDER / name).write_text(content)
    return found


def read_record(path: Path) -> Found:
    return msgspec.json.decode(path.read_bytes(), type=Found)


if __name__ == "__main__":
    sys.exit(main())
