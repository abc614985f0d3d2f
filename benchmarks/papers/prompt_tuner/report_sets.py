"""Page sections: the summary, the sets' distance from the anchors, and kept idle GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from statistics import fmean

import msgspec

from benchmarks.papers.prompt_tuner import paper, report_bars, scenarios
from benchmarks.papers.prompt_tuner.grid import SEED
from benchmarks.papers.prompt_tuner.record import TEXT, Evaluation, Page, Spread, over, show, span
from benchmarks.papers.prompt_tuner.report_bars import Bar, starts, starts_most
from benchmarks.papers.prompt_tuner.scenarios import (
    FEWER_GPUS,
    HEAVY,
    MAIN,
    MEDIUM,
    NOBODY,
    OF_INFLESS,
    Condition,
    Group,
    Reading,
    System,
    at,
    of_bank,
)
from benchmarks.papers.prompt_tuner.searching import STEP, Anchored
from benchmarks.tables import head, paragraph, row
from stoker.manager.study.statistics import MeanEstimate, difference, estimate


def sets_that_count(page: Page) -> str:
    record, grid = page.record, page.grid
    said = grid.anchors.said()
    lines = [_searched(page), ""]
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
    return "\n".join([*lines, "", _predicted_anchors(page)])


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
    late = fmean(one.violations(MEDIUM, NOBODY))
    allocated = fmean(100.0 * run.allocated for run in one.results(MEDIUM, page.chosen[Reading.RESIZES]))
    return [
        (found, found / said - 1.0) for found, said in zip((late, allocated), page.grid.anchors.said()[:2], strict=True)
    ]


def still_within(page: Page) -> list[Evaluation]:
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
    lines = head("system", "kept, s", "%", "$", "points more than ours at the same cost")
    for window_s, system in _ours():
        late, cost = (show(estimate(of(MEDIUM, system))) for of in (one.violations, one.costs))
        lines.append(row("ours", f"{window_s:g}", late, cost, ""))
    for reading, how, system in theirs(page):
        late, cost = (show(estimate(of(MEDIUM, system))) for of in (one.violations, one.costs))
        apart = apart_at_the_same_cost(page, system)
        told = show(apart, sign=True) if apart is not None else "ours was not run at that cost"
        lines.append(row(reading.value, how, late, cost, told))
    return "\n".join(lines)


def theirs(page: Page) -> Iterator[tuple[Reading, str, System]]:
    for reading in OF_INFLESS:
        least, most = sorted(scenarios.KEPT_S)
        short, long = scenarios.kept(page.chosen[reading])
        yield reading, f"{least:g}", short
        yield reading, "by its histogram, 10 to 60", page.chosen[reading]
        yield reading, f"{most:g}", long


def apart_at_the_same_cost(page: Page, system: System) -> MeanEstimate | None:
    """Return how many percentage points more jobs are late than with our scheduler at equal cost; None if the costs of
    our windows do not enclose it.
    """
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
    return [(each, scenarios.of_window(each, usual_s=paper.WINDOW_S)) for each in sorted(paper.WINDOWS_S)]


def short(page: Page) -> str:
    found = list(report_bars.against_baselines(page.sets, page.chosen, Condition.NOBODY))
    text = [bar for bar in found if any(reading.value in bar.what for reading in TEXT)]
    signs = [bar for _, *pair in report_bars.ablation_bars(page.sets) for bar in pair]
    sets = len(page.sets)
    told = [
        _behind(page),
        f"""Of the {len(text)} bars against the readings nearest to the text (INFless whose instances hold and wait,
        ElasticFlow that resizes) {_held(text, sets)}; of all {len(found)} {_held(found, sets)}. Of the {len(signs)}
        signs of the scheduler's parts {_held(signs, sets)}.""",
        _sets(page),
        _less(page),
        _times(page),
        _scarce(page),
        _by_cost(page),
        *_starting(page),
        f"""The other way round than in the paper, by the most central set where no other is named:
        {"; ".join(_reversed(page)) or "nothing"}. Not seen, where the paper has it:
        {"; ".join(_not_seen(page)) or "nothing"}.""",
    ]
    return "\n".join(paragraph(one, bullet=True) for one in told)


def _behind(page: Page) -> str:
    one, said, sets = page.central, paper.TABLE_8["whole"].violations, len(page.sets)
    late = estimate(one.violations(MEDIUM, NOBODY))
    off = late.mean / said - 1.0
    told = []
    for reading in Reading:
        theirs = page.chosen[reading]
        points = over(page.sets, partial(Evaluation.more_violations, group=MEDIUM, system=theirs, than=NOBODY))
        times = over(page.sets, partial(Evaluation.times_the_cost, group=MEDIUM, system=theirs, of=NOBODY))
        told.append(f"{reading.value} {_both(points)} points and {_both(times, digits=2)} times the cost")
    return f"""Where nobody learns, at medium load and S = 1, ours has {show(late)} % of the jobs late; the paper's
        {said:g} was an anchor, of which that is {abs(off):.0%} {"less" if off < 0 else "more"}. Behind ours are, with
        the most central set (and over all {sets} sets): {"; ".join(told)}."""


def _sets(page: Page) -> str:
    searched, anchors = page.record.searched, page.grid.anchors
    if not searched.stages:
        return "The sets were not searched for: this page is a first look at one choice."
    worst = [each.worst(page.grid) for each in searched.stages[-1]]
    wanted = sum(each <= anchors.within + 1e-9 for each in worst)
    still = still_within(page)
    central = "is one of them" if page.central in still else "is not one of them"
    allocated = estimate([100.0 * run.allocated for run in page.central.results(MEDIUM, page.chosen[Reading.RESIZES])])
    return f"""No set gives the anchors well: within {anchors.within:.0%} of each are {wanted} of the {len(worst)} that
        the search came down to, so the limit was raised to {searched.within:.0%}, where {len(page.sets)} are run. Under
        seeds that the search had not seen, {len(still)} of these {len(page.sets)} are still within it; the most central
        one, which every figure is of, {central} (GPUs that ElasticFlow has allocated: {show(allocated)} %, the paper
        {anchors.said()[1]:g})."""


def _both(found: Spread, *, digits: int = 1) -> str:
    central, between = found.shown(digits=digits)
    return f"{central} ({between})"


def _held(found: Sequence[Bar], sets: int) -> str:
    everywhere = sum(bar.sets == sets for bar in found)
    return f"{report_bars.held(found)} hold by their interval with the most central set and {everywhere} with each set"


def _less(page: Page) -> str:
    one = page.central
    fewer = []
    for reading in TEXT:
        low, high = paper.FEWER_POINTS[scenarios.POLICIES[reading]]
        found = [one.more_violations(at(load, 1.0), page.chosen[reading], NOBODY).mean for load in paper.MAIN_LOADS]
        fewer.append(f"{_range(found)} points behind are {reading.value} ({low:g} to {high:g})")
    points, saved = (
        [one.more_violations(at("medium", s), scenarios.NO_PROMPTS, NOBODY).mean for s in paper.EMERGENCES],
        [one.saved(at("medium", s), NOBODY, scenarios.NO_PROMPTS).mean for s in paper.EMERGENCES],
    )
    bank = "{:g} to {:g} points, {:g} to {:g} %".format(*paper.BANK_FEWER_POINTS, *paper.BANK_SAVED)
    return f"""Against the paper's sizes, in brackets: over the loads {"; ".join(fewer)}; the bank saves
        {_range(points)} points of violations and {_range(saved)} % of the cost over S ({bank})."""


def _times(page: Page) -> str:
    one, told = page.central, []
    for reading in TEXT:
        theirs, policy = page.chosen[reading], scenarios.POLICIES[reading]
        fewer, cheaper = [], []
        for group in MAIN:
            late, ours = one.violations(group, theirs), one.violations(group, NOBODY)
            fewer.append((fmean(late) / fmean(ours), group.name))
            cheaper.append((one.times_the_cost(group, theirs, NOBODY).mean, group.name))
        (late_by, late_at), (dearer_by, dearer_at) = max(fewer), max(cheaper)
        told.append(
            f"{late_by:.1f} times the violations ({late_at}; the paper {paper.TIMES_FEWER[policy]:g}) and"
            f" {dearer_by:.1f} times the cost ({dearer_at}; {paper.TIMES_CHEAPER[policy]:g}) under {reading.value}"
        )
    return (
        f"""The most of the {len(MAIN)} loads and S, by their means, beside the paper's abstract: {"; ".join(told)}."""
    )


def _starting(page: Page) -> Iterator[str]:
    mean, most = (100.0 * share for share in paper.INITIALISATION)
    found = starts(page, Reading.HOLD)
    if found:
        over = sum(each.mean > mean for each in found)
        yield f"""Under {Reading.HOLD.value}, instances start during {show(found[0])} % of a job's latency, at most
            {starts_most(page, Reading.HOLD):.0f} %; the paper has {mean:.0f} and {most:.0f}, and the mean is over that
            in {over} of {len(found)} sets."""


def _scarce(page: Page) -> str:
    groups, told = (MEDIUM, *FEWER_GPUS[::-1]), []
    for reading in OF_INFLESS:
        found = [page.central.more_violations(group, page.chosen[reading], NOBODY) for group in groups]
        told.append(f"{', '.join(map(show, found))} points ({reading.value})")
    return f"""How scarce GPUs are decides the distance to INFless: on {", ".join(f"{group.gpus}" for group in groups)}
        GPUs, with the same jobs, {"; ".join(told)}."""


def _by_cost(page: Page) -> str:
    told = []
    for reading, how, system in theirs(page):
        apart = apart_at_the_same_cost(page, system)
        if apart is not None:
            told.append(f"{show(apart, sign=True)} ({reading.value}; {how})")
    found = "; ".join(told) or "ours was run at no such cost"
    return f"""Who keeps idle GPUs longer has fewer late jobs and pays more. Points more late jobs than under ours at
        the same cost, by how many seconds INFless keeps instances: {found}."""


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def _reversed(page: Page) -> Iterator[str]:
    one, hold = page.central, page.chosen[Reading.HOLD]
    for part, more, times in report_bars.ablation_bars(page.sets):
        if not more.holds_by_mean(more.found[0]):
            yield f"{part.what} {show(more.found[0], sign=True)} points ({part.points})"
        elif against := [each for each in more.found if each.high < 0.0]:
            told = ", ".join(show(each, sign=True) for each in against)
            yield f"{part.what} {told} points in {len(against)} of {len(more.found)} sets ({part.points})"
        if not times.holds_by_mean(times.found[0]):
            yield f"{part.what} {show(times.found[0], digits=2)} times the cost ({part.times})"
    saved = [one.saved(at("medium", s), NOBODY, hold).mean for s in paper.EMERGENCES]
    said = [paper.SAVED[s] for s in paper.EMERGENCES]
    if (saved[-1] > saved[0]) != (said[-1] > said[0]):
        yield f"""{_row(saved, 1)} % of INFless's cost are saved at S = {_row(paper.EMERGENCES, 1)} ({_row(said, 0)})"""
    large, medium = (_late(page, HEAVY[-1]), _late(page, MEDIUM))
    theirs = paper.TABLE_7["large"]["prompt-tuner"].violations, paper.TABLE_8["whole"].violations
    if (large.mean > medium.mean) != (theirs[0] > theirs[1]):
        yield f"""on {paper.LARGE_GPUS} GPUs {show(large)} % are late, and {show(medium)} % on {paper.GPUS}
            ({theirs[0]:g}, {theirs[1]:g})"""


def _not_seen(page: Page) -> Iterator[str]:
    one, hold, resizes = page.central, page.chosen[Reading.HOLD], page.chosen[Reading.RESIZES]
    smaller = of_bank(paper.BANK_SIZES[1])
    points = one.more_violations(smaller, NOBODY, NOBODY, where=MEDIUM)
    times = one.times_the_cost(smaller, NOBODY, NOBODY, where=MEDIUM)
    if points.low <= 0.0 or times.low <= 1.0:
        yield f"""with {paper.BANK_SIZES[1]:,} candidates many more violations and a much higher cost
            ({show(points, sign=True)} points, {show(times, digits=2)} times the cost)"""
    urgent = at("medium", paper.EMERGENCES[0])
    apart = one.more_violations(urgent, resizes, hold)
    if apart.low > 0.0:
        yield f"""at S = {urgent.emergence:g} INFless as late as ElasticFlow ({show(apart)} points apart)"""
    large, usual = (one.more_violations(group, hold, NOBODY) for group in (HEAVY[-1], MEDIUM))
    if large.low <= usual.mean:
        yield f"""a greater distance to INFless on {paper.LARGE_GPUS} GPUs ({show(large)} points, {show(usual)} on
            {paper.GPUS})"""


def _late(page: Page, group: Group) -> MeanEstimate:
    return estimate(page.central.violations(group, NOBODY))


def _row(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)
