"""`python -m stoker.manager.study.reproduce [--fits N] [--out DIR]`: fit, predict, and write the page."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from stoker.manager.study.reproduce import fit, paper, predict, report
from stoker.manager.study.reproduce.parameters import Parameters

PAGE, PARAMETERS = "context-paper.md", "context-paper-parameters.json"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when no parameter set is good."""
    ask = argparse.ArgumentParser(prog="python -m stoker.manager.study.reproduce", description=__doc__)
    ask.add_argument("--fits", type=int, default=20, help="parameter sets to find [20]")
    ask.add_argument("--jobs", type=int, default=2, help="processes [2]")
    ask.add_argument("--out", type=Path, default=Path("docs/reproduction"), help="where the page goes")
    asked = ask.parse_args(arguments)
    found = list(fit.fits(asked.fits))
    sys.stderr.write(f"{len(found)} parameter sets with errors under {fit.GOOD:.0%}\n")
    if not found:
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    written = [msgspec.to_builtins(each) for each in found]
    (asked.out / PARAMETERS).write_text(json.dumps(written, indent=1) + "\n")  # before anything is predicted
    with ProcessPoolExecutor(asked.jobs) as pool:
        static = list(pool.map(_static, paper.RUNS, [found[0]] * len(paper.RUNS)))
        predicted = []
        for number, each in enumerate(pool.map(predict.everything, found)):
            sys.stderr.write(f"predicted with set {number + 1} of {len(found)}\n")
            predicted.append(tuple(each))
    page = report.write(
        report.Found(
            fits=tuple(found),
            simulated=tuple(zip(paper.RUNS, static, strict=True)),
            predictions=tuple(predicted),
        )
    )
    (asked.out / PAGE).write_text(page)
    sys.stdout.write(f"{asked.out / PAGE}\n")
    return 0


def _static(run: paper.Run, parameters: Parameters) -> float:
    return predict.static(parameters, run).value


if __name__ == "__main__":
    sys.exit(main())
