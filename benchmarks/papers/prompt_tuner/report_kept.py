"""The section of the page on how long idle GPUs are kept: late jobs against cost, for ours and for INFless."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

from benchmarks.papers.prompt_tuner import paper, readings, texts
from benchmarks.papers.prompt_tuner.cases import MEDIUM, System
from benchmarks.papers.prompt_tuner.page import Page, lines_of
from benchmarks.papers.prompt_tuner.readings import OF_INFLESS, Reading
from benchmarks.papers.prompt_tuner.summary import show
from benchmarks.tables import head, row
from stoker.manager.study.statistics import MeanEstimate, difference, estimate


def kept(page: Page) -> str:
    """The section."""
    one = page.central
    lines = ["## How long idle GPUs are kept: late jobs against cost", "", texts.KEPT, ""]
    lines += head("system", "kept, s", "%", "$", "points more than ours at the same cost")
    for window_s, system in _ours():
        late, cost = (show(estimate(of(MEDIUM, system))) for of in (one.violations, one.costs))
        lines.append(row("ours", f"{window_s:g}", late, cost, ""))
    for reading, how, system in theirs(page):
        late, cost = (show(estimate(of(MEDIUM, system))) for of in (one.violations, one.costs))
        apart = apart_at_the_same_cost(page, system)
        told = show(apart, sign=True) if apart is not None else "ours was not run at that cost"
        lines.append(row(reading.value, how, late, cost, told))
    return lines_of(*lines)


def theirs(page: Page) -> Iterator[tuple[Reading, str, System]]:
    """Both readings of INFless, with how long idle instances are kept, in words."""
    for reading in OF_INFLESS:
        least, most = sorted(readings.KEPT_S)
        short, long = readings.kept(page.chosen[reading])
        yield reading, f"{least:g}", short
        yield reading, "by its histogram, 10 to 60", page.chosen[reading]
        yield reading, f"{most:g}", long


def apart_at_the_same_cost(page: Page, system: System) -> MeanEstimate | None:
    """Points by which more jobs are late than under ours, whose window is such that it costs the same on the mean: on a
    straight line between two windows that were run, seed by seed. None where no two windows enclose that cost."""
    one = page.central
    cost, late = fmean(one.costs(MEDIUM, system)), one.violations(MEDIUM, system)
    points = [(fmean(one.costs(MEDIUM, each)), one.violations(MEDIUM, each)) for _, each in _ours()]
    for (low, late_low), (high, late_high) in pairwise(points):
        if low <= cost <= high:
            share = (cost - low) / (high - low) if high > low else 0.0
            ours = [less + (more - less) * share for less, more in zip(late_low, late_high, strict=True)]
            return difference(late, ours)
    return None


def _ours() -> list[tuple[float, System]]:
    return [(each, readings.of_window(each, usual_s=paper.WINDOW_S)) for each in sorted(paper.WINDOWS_S)]
