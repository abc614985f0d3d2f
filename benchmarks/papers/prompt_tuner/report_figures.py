"""Sections of the page: the paper's figures and Table 7, each beside what the paper has."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.prompt_tuner import paper, scenarios
from benchmarks.papers.prompt_tuner.record import TEXT, Evaluation, Page, show, span
from benchmarks.papers.prompt_tuner.scenarios import (
    FEWER_GPUS,
    HEAVY,
    MAIN,
    MEDIUM,
    NOBODY,
    Group,
    Reading,
    System,
    at,
    of_bank,
)
from benchmarks.tables import head, row
from stoker.manager.study.statistics import MeanEstimate, estimate


def figure_3c(page: Page) -> str:
    one, systems = page.central, [NOBODY, *page.chosen.values()]
    lines = head("GPUs, at most", "ours, %", *(f"{reading.value}, %" for reading in page.chosen))
    lines += [
        row(f"{group.gpus}", *(show(estimate(one.violations(group, system))) for system in systems))
        for group in (*FEWER_GPUS, MEDIUM)
    ]
    return "\n".join(lines)


def figure_7(page: Page) -> str:
    one, systems = page.central, [NOBODY, *(page.chosen[reading] for reading in TEXT)]
    names = ["ours", *(reading.value for reading in TEXT)]
    lines = head("load, S", *(f"{name}, %" for name in names), *(f"{name}, $" for name in names))
    for group in MAIN:
        late = [show(estimate(one.violations(group, system))) for system in systems]
        lines.append(row(group.name, *late, *(show(estimate(one.costs(group, system))) for system in systems)))
    return "\n".join(lines)


def figure_7_said(page: Page) -> str:
    return "\n".join([*head("what", "paper", "the most central set", ""), *_said(page)])


def _said(page: Page) -> Iterator[str]:
    one = page.central
    for reading in TEXT:
        low, high = paper.FEWER_POINTS[scenarios.POLICIES[reading]]
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
    lines = head("setting", "", "ours", *(reading.value for reading in TEXT))
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
    return "\n".join(lines)


def figure_8(page: Page) -> dict[str, str]:
    one, numbers = page.central, ("%", "$", "points more", "times the cost")
    groups = {emergence: at("medium", emergence) for emergence in paper.EMERGENCES}
    reuse = [
        _beside(one, f"{emergence:g}", group, system, group, what)
        for emergence, group in groups.items()
        for what, system in scenarios.FIGURE_8_AB.items()
    ]
    points = [show(one.more_violations(group, scenarios.NO_PROMPTS, NOBODY)) for group in groups.values()]
    saved = [show(one.saved(group, NOBODY, scenarios.NO_PROMPTS)) for group in groups.values()]
    windows = [(f"{each:g}", scenarios.of_window(each, usual_s=paper.WINDOW_S)) for each in paper.WINDOWS_S]
    found = {
        "reuse": [*head("S", "what", *numbers), *reuse],
        "bank": [
            *head("what the bank does", "paper", *(f"S = {emergence:g}" for emergence in groups)),
            row("points fewer violations", "{:.0f} to {:.0f}".format(*paper.BANK_FEWER_POINTS), *points),
            row("% of the cost saved", "{:.0f} to {:.0f}".format(*paper.BANK_SAVED), *saved),
        ],
        "window": [
            *head("window, s", *numbers), *(_beside(one, name, MEDIUM, system, MEDIUM) for name, system in windows)
        ],
        "size": [
            *head("candidates in the bank", *numbers),
            *(_beside(one, f"{size:,}", of_bank(size), NOBODY, MEDIUM) for size in paper.BANK_SIZES),
        ],
    }  # fmt: skip
    return {f"figure_8_{name}": "\n".join(lines) for name, lines in found.items()}


def _beside(one: Evaluation, name: str, group: Group, system: System, usual: Group, *more: str) -> str:
    numbers = [show(estimate(one.violations(group, system))), show(estimate(one.costs(group, system)))]
    if (group, system) == (usual, NOBODY):
        return row(name, *more, *numbers, "", "")
    points = one.more_violations(group, system, NOBODY, where=usual)
    times = one.times_the_cost(group, system, NOBODY, where=usual)
    return row(name, *more, *numbers, show(points, sign=True), show(times, digits=2))
