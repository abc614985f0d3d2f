"""The section of the page on the sets: the search for them, and how near they are to the anchors.

The section of the page on how long idle GPUs are kept: late jobs against cost, for ours and for INFless.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from statistics import fmean

import msgspec

from benchmarks.papers.prompt_tuner import paper, readings, texts
from benchmarks.papers.prompt_tuner.cases import MEDIUM, NOBODY, System, at
from benchmarks.papers.prompt_tuner.grid import SEED
from benchmarks.papers.prompt_tuner.page import Page, lines_of, span
from benchmarks.papers.prompt_tuner.readings import OF_INFLESS, Reading
from benchmarks.papers.prompt_tuner.search import STEP, Anchored
from benchmarks.papers.prompt_tuner.summary import Evaluation, show
from benchmarks.tables import head, paragraph, row
from stoker.manager.study.statistics import MeanEstimate, difference, estimate


def sets_that_count(page: Page) -> str:
    record, grid = page.record, page.grid
    said = grid.anchors.said()
    lines = ["## The sets that count", "", texts.SEARCH, "", _searched(page), ""]
    names = list(page.sets[0].choice.values(grid))
    anchors = (
        f"ours late, % ({said[0]})",
        f"ElasticFlow allocated, % ({said[1]:g})",
        f"its cost over ours, S = 1.5 ({said[2]})",
    )
    fresh = ("other seeds: ours late, %", "ElasticFlow allocated, %")
    lines += head(*(f"`{name}`" for name in names), *anchors, "off by at most", *fresh, "INFless: points, holds",
                  "at once", "times our cost, holds", "at once")  # fmt: skip
    last = {each.choice: each for stage in record.searched.stages for each in stage}
    for each in page.sets:
        values = [f"{value}" for value in each.choice.values(grid).values()]
        found = last.get(each.choice)
        worst = f"{found.worst(grid):.0%}" if found is not None else ""
        again = (f"{value:.1f} ({off:+.0%})" for value, off in again_anchored(page, each))
        lines.append(row(*values, *_anchored(found), worst, *again, *_distances(page, each)))
    return lines_of(*lines, "", _predicted_anchors(page))


def _searched(page: Page) -> str:
    searched, grid = page.record.searched, page.grid
    if not searched.stages:
        return "The sets were not searched for: this page is a first look at one choice."
    told = [
        f"{len(found)} combinations under {'seed' if len(stage.seeds) == 1 else 'seeds'} {span(stage.seeds)}"
        + (f" (looked at further within {stage.within:.0%})" if stage is not grid.stages[-1] else "")
        for stage, found in zip(grid.stages, searched.stages, strict=False)
    ]
    every = prod(map(len, msgspec.structs.astuple(grid.values)))
    return paragraph(f"""Fixed on {grid.fixed_on}; {grid.draws} of the {every} combinations were drawn by chance
        (seed {SEED}). Measured were {"; ".join(told)}. {_admitted(page)} Run were {len(page.sets)}, the most central
        first.{early(page)}""")


def _admitted(page: Page) -> str:
    searched, grid = page.record.searched, page.grid
    worst = [each.worst(grid) for each in searched.stages[-1]]
    limits = [grid.anchors.within]
    while limits[-1] < searched.within - STEP / 2:
        limits.append(limits[-1] + STEP)
    within = ", ".join(f"{sum(each <= limit + 1e-9 for each in worst)} within {limit:.0%}" for limit in limits)
    return f"""Of the {len(worst)} of the last stage, {within} of every anchor: {limits[0]:.0%} was
        wanted, and the limit is raised until {grid.anchors.fewest} count."""


def _anchored(found: Anchored | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    shown = [f"{fmean(values):.{2 if place == 2 else 1}f}" for place, values in enumerate(found.values)]
    return [*shown, *("" for _ in range(3 - len(shown)))]


def _distances(page: Page, one: Evaluation) -> Iterator[str]:
    both = [page.chosen[reading] for reading in (Reading.HOLD, Reading.AT_ONCE)]
    yield from (show(one.more_violations(MEDIUM, each, NOBODY)) for each in both)
    yield from (show(one.times_the_cost(MEDIUM, each, NOBODY), digits=2) for each in both)


def _predicted_anchors(page: Page) -> str:
    one, resizes, loose = page.central, page.chosen[Reading.RESIZES], at("medium", 1.5)
    late = estimate(one.violations(MEDIUM, NOBODY))
    allocated = estimate([100.0 * run.allocated for run in one.results(MEDIUM, resizes)])
    dearer = one.times_the_cost(loose, resizes, NOBODY)
    said = page.grid.anchors.said()
    told = [
        f"{what} {show(found, digits=digits)} ({paper:g}, {found.mean / paper - 1.0:+.0%})"
        for what, found, paper, digits in (
            ("ours late, %", late, said[0], 1),
            ("ElasticFlow allocated, %", allocated, said[1], 1),
            ("its cost over ours, S = 1.5", dearer, said[2], 2),
        )
    ]
    return paragraph(f"""The most central set is the one nearest to the others in the grid, not the one that fits best.
        Under the seeds that the search has not seen it gives, with the paper's anchor in brackets:
        {"; ".join(told)}. By the first two, which every set is run for (*other seeds* above),
        {len(still_within(page))} of the {len(page.sets)} sets are within {page.record.searched.within:.0%} of the
        anchors under these seeds too, and the most central one is
        {"among them" if page.central in still_within(page) else "not among them"}.""")


def again_anchored(page: Page, one: Evaluation) -> list[tuple[float, float]]:
    """A set's first two anchors under the seeds that results are from, and how far each is off."""
    late = fmean(one.violations(MEDIUM, NOBODY))
    allocated = fmean(100.0 * run.allocated for run in one.results(MEDIUM, page.chosen[Reading.RESIZES]))
    return [
        (found, found / said - 1.0) for found, said in zip((late, allocated), page.grid.anchors.said()[:2], strict=True)
    ]


def still_within(page: Page) -> list[Evaluation]:
    """The sets that would count under the seeds that results are from, by the anchors that every set is run for."""
    within = page.record.searched.within + 1e-9
    return [one for one in page.sets if all(abs(off) <= within for _, off in again_anchored(page, one))]


def early(page: Page) -> str:
    whole, done = len(page.grid.stages), len(page.record.searched.stages)
    if done in (0, whole):
        return ""
    return (
        f" **The search is not over: {whole - done} of its {whole} stages are missing, and all below is a first look.**"
    )


def kept(page: Page) -> str:
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
