"""Sections of the page: the paper's figures and Table 7, each beside what the paper has."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.prompt_tuner import paper, readings, texts
from benchmarks.papers.prompt_tuner.cases import FEWER_GPUS, HEAVY, MAIN, MEDIUM, NOBODY, Group, System, at, of_bank
from benchmarks.papers.prompt_tuner.page import TEXT, Page, lines_of, span
from benchmarks.papers.prompt_tuner.readings import Reading
from benchmarks.papers.prompt_tuner.summary import Evaluation, show
from benchmarks.tables import head, paragraph, row
from stoker.manager.study.statistics import MeanEstimate, estimate


def figure_3c(page: Page) -> str:
    one, systems = page.central, [NOBODY, *page.chosen.values()]
    lines = ["## Figure 3c: violations by the number of GPUs", "", texts.FIGURE_3C, "", paragraph(page.one_set()), ""]
    lines += head("GPUs, at most", "ours, %", *(f"{reading.value}, %" for reading in page.chosen))
    lines += [
        row(f"{group.gpus}", *(show(estimate(one.violations(group, system))) for system in systems))
        for group in (*FEWER_GPUS, MEDIUM)
    ]
    return lines_of(*lines)


def figure_7(page: Page) -> str:
    one, systems = page.central, [NOBODY, *(page.chosen[reading] for reading in TEXT)]
    names = ["ours", *(reading.value for reading in TEXT)]
    lines = ["## Figure 7: violations and cost by load and S", "", texts.FIGURE_7, "", paragraph(page.one_set()), ""]
    lines += head("load, S", *(f"{name}, %" for name in names), *(f"{name}, $" for name in names))
    for group in MAIN:
        late = [show(estimate(one.violations(group, system))) for system in systems]
        lines.append(row(group.name, *late, *(show(estimate(one.costs(group, system))) for system in systems)))
    lines += ["", "![Figure 7](prompttuner-figure-7.png)", "", "Against the paper's words, pairwise by seed:", ""]
    lines += head("what", "paper", "the most central set", "")
    lines += _said(page)
    return lines_of(*lines)


def _said(page: Page) -> Iterator[str]:
    one = page.central
    for reading in TEXT:
        low, high = paper.FEWER_POINTS[readings.POLICIES[reading]]
        for load in paper.MAIN_LOADS:
            fewer = one.more_violations(at(load, 1.0), page.chosen[reading], NOBODY)
            what = f"7a: points under {reading.value}, {load}"
            yield row(what, f"{low:.0f} to {high:.0f}", show(fewer), verdict(fewer, low, high))
    for emergence in paper.EMERGENCES:
        for reading in TEXT:
            fewer = one.more_violations(at("medium", emergence), page.chosen[reading], NOBODY)
            least = f"at least {paper.LEAST_FEWER_POINTS:.0f}"
            what, where = (
                f"7c: points under {reading.value}, S = {emergence:g}",
                verdict(fewer, paper.LEAST_FEWER_POINTS),
            )
            yield row(what, least, show(fewer), where)
    for emergence, percent in paper.SAVED.items():
        saved = one.saved(at("medium", emergence), NOBODY, page.chosen[Reading.HOLD])
        what, where = f"7d: % saved of INFless's cost, S = {emergence:g}", verdict(saved, percent, percent)
        yield row(what, f"{percent:.0f}", show(saved), where)
    for emergence in paper.EMERGENCES:
        last = emergence == paper.EMERGENCES[-1]
        said = f"up to {paper.SAVED_OF_ELASTIC_FLOW:.0f} (an anchor)" if last else "(figure only)"
        saved = one.saved(at("medium", emergence), NOBODY, page.chosen[Reading.RESIZES])
        yield row(f"7d: % saved of ElasticFlow's cost, S = {emergence:g}", said, show(saved), "")


def verdict(found: MeanEstimate, low: float, high: float = float("inf")) -> str:
    if found.low > high:
        return "over"
    return "under" if found.high < low else "reached" if found.low >= low else "touches it"


def table_7(page: Page) -> str:
    one, systems = page.central, [NOBODY, *(page.chosen[reading] for reading in TEXT)]
    lines = ["## Table 7: large models, and 96 GPUs", "", texts.TABLE_7, "", paragraph(page.one_set()), ""]
    lines += head("setting", "", "ours", *(reading.value for reading in TEXT))
    for group in HEAVY:
        said = paper.TABLE_7[group.name]
        late = (f"{said[each.policy].violations} / {said[each.policy].cost}" for each in systems)
        lines.append(row(group.name, "paper: % / $", *late))
        here = (
            f"{show(estimate(one.violations(group, each)))} / {show(estimate(one.costs(group, each)))}"
            for each in systems
        )
        seeds = span(sorted(run.seed for run in one.results(group, NOBODY)))
        lines.append(row("", f"here, seeds {seeds}: % / $", *here))
        apart = (f"{said[each.policy].violations - said[NOBODY.policy].violations:.1f}" for each in systems[1:])
        lines.append(row("", "paper: points more than ours", "", *apart))
        points = (show(one.more_violations(group, each, NOBODY)) for each in systems[1:])
        lines.append(row("", "here: points more than ours", "", *points))
    return lines_of(*lines)


def figure_8(page: Page) -> str:
    one = page.central
    lines = ["## Figure 8: reuse by S, the window, the size of the bank", "", texts.FIGURE_8, ""]
    lines += [paragraph(page.one_set()), ""]
    lines += head("S", "what", "%", "$", "points more", "times the cost")
    for emergence in paper.EMERGENCES:
        group = at("medium", emergence)
        for what, system in readings.FIGURE_8_AB.items():
            lines.append(_beside(one, f"{emergence:g}", group, system, group, what))
    lines += ["", *head("what the bank does", "paper", *(f"S = {emergence:g}" for emergence in paper.EMERGENCES))]
    groups = [at("medium", emergence) for emergence in paper.EMERGENCES]
    points = [show(one.more_violations(group, readings.NO_PROMPTS, NOBODY)) for group in groups]
    saved = [show(one.saved(group, NOBODY, readings.NO_PROMPTS)) for group in groups]
    lines.append(row("points fewer violations", "{:.0f} to {:.0f}".format(*paper.BANK_FEWER_POINTS), *points))
    lines.append(row("% of the cost saved", "{:.0f} to {:.0f}".format(*paper.BANK_SAVED), *saved))
    lines += ["", "![Figure 8](prompttuner-figure-8.png)", ""]
    lines += head("window, s", "%", "$", "points more", "times the cost")
    for window_s in paper.WINDOWS_S:
        system = readings.of_window(window_s, usual_s=paper.WINDOW_S)
        lines.append(_beside(one, f"{window_s:g}", MEDIUM, system, MEDIUM))
    lines += ["", *head("candidates in the bank", "%", "$", "points more", "times the cost")]
    lines += [_beside(one, f"{size:,}", of_bank(size), NOBODY, MEDIUM) for size in paper.BANK_SIZES]
    return lines_of(*lines)


def _beside(one: Evaluation, name: str, group: Group, system: System, usual: Group, *more: str) -> str:
    numbers = [show(estimate(one.violations(group, system))), show(estimate(one.costs(group, system)))]
    if (group, system) == (usual, NOBODY):
        return row(name, *more, *numbers, "", "")
    points = one.more_violations(group, system, NOBODY, where=usual)
    times = one.times_the_cost(group, system, NOBODY, where=usual)
    return row(name, *more, *numbers, show(points, sign=True), show(times, digits=2))
