"""`docs/reproduction/prompttuner.md`, from its record: paper and ours side by side, and what cannot be known."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from statistics import fmean

import msgspec

from benchmarks.prompt_tuner import index, report_bars, report_figures, texts
from benchmarks.prompt_tuner.cases import MEDIUM, NOBODY, at
from benchmarks.prompt_tuner.page import Page, lines_of, span
from benchmarks.prompt_tuner.parameters import MODELS
from benchmarks.prompt_tuner.readings import Reading
from benchmarks.prompt_tuner.record import Record
from benchmarks.prompt_tuner.report_compared import compared
from benchmarks.prompt_tuner.report_kept import kept
from benchmarks.prompt_tuner.search import STEP, Anchored
from benchmarks.prompt_tuner.short import short
from benchmarks.prompt_tuner.summary import Evaluation, show
from benchmarks.prompt_tuner.why import WHY
from benchmarks.words import head, paragraph, row
from stoker.manager.study.statistics import estimate

RECORD = "prompttuner.json"
_NEAR_POINTS, _FEW = 1.0, 4
"""A reading that was tried in more than `_FEW` settings shows those within `_NEAR_POINTS` of its best one."""


def write(record: Record) -> str:
    """The page, in Markdown."""
    page = Page(record)
    parts = (
        texts.HEAD, _made(page), short(page), index.write(), report_bars.against(page), report_bars.ablations(page),
        report_bars.experiments(page), _sets(page), report_figures.figure_3c(page), report_figures.figure_7(page),
        report_figures.table_7(page), report_figures.figure_8(page), compared(page), kept(page), _settings(page),
        _workload(page), texts.UNKNOWABLE,
    )  # fmt: skip
    return "\n".join(parts)


def _made(page: Page) -> str:
    record, sets = page.record, len(page.sets)
    others = f"other sets seeds {span(record.few)}" if sets > 1 else "no other set was run"
    return lines_of(
        paragraph(f"""Made by {record.facts.line()}. Every result on this page is computed from [{RECORD}]({RECORD}),
            which has every run; `make reproduce` goes on where it was stopped, as long as the code is
            the same. The search had seeds
            {span(_searched_seeds(page))}, the most central set seeds {span(record.seeds)},
            {others}.{_early(page)}{_again(page)}""")
    )


def _again(page: Page) -> str:
    """Which runs are of another commit, in words."""
    again = page.record.again
    if again is None:
        return ""
    return f""" A baseline's settings were searched and its runs done again by {again.line()}; where its setting stayed
        the same each run came to the same violations and cost as before."""


def _early(page: Page) -> str:
    """Whether the page was written before the search was over, in words."""
    whole, done = len(page.grid.stages), len(page.record.searched.stages)
    if done in (0, whole):
        return ""
    return (
        f" **The search is not over: {whole - done} of its {whole} stages are missing, and all below is a first look.**"
    )


def _searched_seeds(page: Page) -> tuple[int, ...]:
    return page.grid.stages[max(0, len(page.record.searched.stages) - 1)].seeds


def _sets(page: Page) -> str:
    record, grid = page.record, page.grid
    said = grid.anchors.said()
    lines = ["## The sets that count", "", texts.SEARCH, "", _searched(page), ""]
    names = list(page.sets[0].choice.values(grid))
    anchors = (
        f"ours late, % ({said[0]})",
        f"ElasticFlow allocated, % ({said[1]:g})",
        f"its cost over ours, S = 1.5 ({said[2]})",
    )
    lines += head(*(f"`{name}`" for name in names), *anchors, "off by at most", "INFless: points, holds", "at once",
                  "times our cost, holds", "at once")  # fmt: skip
    last = {each.choice: each for stage in record.searched.stages for each in stage}
    for each in page.sets:
        values = [f"{value}" for value in each.choice.values(grid).values()]
        found = last.get(each.choice)
        worst = f"{found.worst(grid):.0%}" if found is not None else ""
        lines.append(row(*values, *_anchored(found), worst, *_distances(page, each)))
    return lines_of(*lines, "", _predicted_anchors(page))


def _predicted_anchors(page: Page) -> str:
    """The anchors on the seeds that the search has not seen."""
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
        {"; ".join(told)}. By the first two, {_still_within(page)} of the {len(page.sets)} sets are within
        {page.record.searched.within:.0%} of the anchors under these seeds too.""")


def _still_within(page: Page) -> int:
    """How many sets would count under the seeds that results are from, by the anchors that every set is run for."""
    late_said, allocated_said, _ = page.grid.anchors.said()
    count = 0
    for one in page.sets:
        late = fmean(one.violations(MEDIUM, NOBODY))
        allocated = fmean(100.0 * run.allocated for run in one.results(MEDIUM, page.chosen[Reading.RESIZES]))
        worst = max(abs(late / late_said - 1.0), abs(allocated / allocated_said - 1.0))
        count += worst <= page.record.searched.within + 1e-9
    return count


def _searched(page: Page) -> str:
    searched, grid = page.record.searched, page.grid
    if not searched.stages:
        return "Nobody searched: this is a look."
    told = [
        f"{len(found)} combinations under {'seed' if len(stage.seeds) == 1 else 'seeds'} {span(stage.seeds)}"
        + (f" (looked at further within {stage.within:.0%})" if stage is not grid.stages[-1] else "")
        for stage, found in zip(grid.stages, searched.stages, strict=False)
    ]
    every = prod(map(len, msgspec.structs.astuple(grid.values)))
    return paragraph(f"""Fixed on {grid.fixed_on}; {grid.draws} of the {every} combinations were drawn by chance.
        Measured were {"; ".join(told)}. {_admitted(page)} Run were {len(page.sets)}, the most central
        first.{_early(page)}""")


def _admitted(page: Page) -> str:
    """How the limit came to be what it is."""
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


def _settings(page: Page) -> str:
    lines = ["## The baselines and their settings", "", texts.BASELINES, ""]
    lines += head("reading", "setting", "%", "$", "taken")
    for reading in Reading:
        lines += _settings_of(page, reading)
    return lines_of(*lines)


def _settings_of(page: Page, reading: Reading) -> Iterator[str]:
    """Those of a reading that come near to the best one, and how many do not."""
    tried = [each for each in page.record.searches if each.reading is reading]
    least = min(each.violations for each in tried)
    far = [each for each in tried if each.violations > least + _NEAR_POINTS and page.chosen[reading] != each.system]
    for each in tried:
        if each not in far or len(tried) <= _FEW:
            taken = "yes" if page.chosen[reading] == each.system else ""
            yield row(reading.value, f"{each.system}", f"{each.violations:.1f}", f"{each.cost:.1f}", taken)
    if far and len(tried) > _FEW:
        low, high = (f"{pick(each.violations for each in far):.1f}" for pick in (min, max))
        yield row(reading.value, f"{len(far)} others, which the record has", f"{low} to {high}", "", "")


def _workload(page: Page) -> str:
    lines = ["## The jobs, and what they depend on", "", texts.WORKLOAD, ""]
    lines += head("parameter", "most central set", "source", "why")
    mine = page.central.parameters
    for name, why in WHY.items():
        lines.append(row(f"`{name}`", value(getattr(mine, name)), why.source, why.reason))
    lines += ["", texts.MODELS, ""]
    lines += head(
        "model", "GPUs a replica", "weights, GB", "cold start, s", "lookup on one GPU, s", "speedup by the bank"
    )
    for model in MODELS.values():
        cells = (f"{model.devices}", f"{model.weights_bytes / 1e9:g}", f"{mine.cold_s(model):.1f}", f"{model.bank_s}")
        lines.append(row(model.name, *cells, "{} to {}".format(*model.speedup)))
    return lines_of(*lines)


def value(what: object) -> str:
    """A parameter as the page shows it."""
    if isinstance(what, tuple):
        return ", ".join(f"{many}: {share:.0%}" for many, share in what)
    return f"{what:.3g}" if isinstance(what, float) and what >= 1e6 else f"{what}"
