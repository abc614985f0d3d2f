"""Sections of the page: the bars, the scheduler without a part, and what the distance to INFless depends on."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.papers.prompt_tuner import bars, paper, readings, texts
from benchmarks.papers.prompt_tuner.bars import Bar
from benchmarks.papers.prompt_tuner.cases import APART, BOUND, FEWER_GPUS, HIGH, MAIN, MEDIUM, NOBODY, Group, System, at
from benchmarks.papers.prompt_tuner.page import TEXT, Page, lines_of
from benchmarks.papers.prompt_tuner.readings import Condition, Reading
from benchmarks.papers.prompt_tuner.summary import show
from benchmarks.papers.prompt_tuner.tuning import other_order
from benchmarks.tables import head, paragraph, row
from stoker.manager.study.statistics import MeanEstimate, estimate


def against(page: Page) -> str:
    """Ours against the baselines, where nobody learns and where somebody does."""
    sets = len(page.sets)
    lines = ["## Bars: nobody learns", "", texts.BARS, ""]
    lines += head("what", "paper", "bar", "the most central set", "holds", f"all {sets} sets", "holds in")
    for bar in bars.against_baselines(page.sets, page.chosen, Condition.NOBODY):
        lines.append(_bar(bar, sets))
    worse = bars.worse_than(page.central, page.chosen)
    against = " and ".join(reading.value for reading in TEXT)
    cases = f"of the {len(MAIN) * len(TEXT)} cases of Figure 7 ({against})"
    what = f"{cases}, those in which ours has more late, beyond the interval"
    lines.append(row(what, "none", "none", ", ".join(worse) or "none", "", "", ""))
    mean, most = bars.rounds(page.central)
    holds = "yes" if mean.high < 1e3 * bars.ROUND_S else "**no**"
    said = "{:.0f} ms, at most {:.0f} ms".format(*(1e3 * seconds for seconds in paper.ROUND_S))
    lines.append(row(f"the mean round at {paper.LARGE_GPUS} GPUs where something changed: what the policy computes",
                     said, f"{1e3 * bars.ROUND_S:.0f} ms", f"{show(mean, digits=2)} ms, at most {most:.0f} ms", holds,
                     "", ""))  # fmt: skip
    lines += ["", "## Bars: who learns", "", texts.CONDITIONS, ""]
    conditions = (Condition.ALL, Condition.OURS_ALONE)
    lines += head("what", "bar", *(cell for one in conditions for cell in (one.value, "holds")))
    columns = [list(bars.against_baselines(page.sets[:1], page.chosen, condition)) for condition in conditions]
    for pair in zip(*columns, strict=True):
        cells = [cell for bar in pair for cell in (show(bar.found[0], digits=bar.digits), bar.verdict)]
        lines.append(row(pair[0].what, f"{pair[0].wanted:g}", *cells))
    ours = [show(estimate(page.central.violations(group, readings.LEARNS))) for group in (MEDIUM, HIGH)]
    alone = [show(estimate(page.central.violations(group, NOBODY))) for group in (MEDIUM, HIGH)]
    cheaper = [show(page.central.times_the_cost(group, NOBODY, readings.LEARNS), digits=2) for group in (MEDIUM, HIGH)]
    lines += ["", paragraph(f"""Learning takes ours from {alone[0]} to {ours[0]} % at medium load and from {alone[1]}
        to {ours[1]} % at high load; without, ours costs {cheaper[0]} and {cheaper[1]} times as much.""")]  # fmt: skip
    return lines_of(*lines)


def _bar(bar: Bar, sets: int) -> str:
    shown, between = bar.spread.shown(digits=bar.digits)
    return row(bar.what, bar.paper, f"{bar.wanted:g}", shown, bar.verdict, between, f"{bar.sets} of {sets}")


def ablations(page: Page) -> str:
    """Table 8, and the bank and runtimes of Figure 8."""
    sets, one = len(page.sets), page.central
    lines = ["## Table 8 and Figure 8: the scheduler without a part", "", texts.ABLATIONS, ""]
    whole = paper.TABLE_8["whole"]
    found = f"{show(estimate(one.violations(MEDIUM, NOBODY)))} % and ${show(estimate(one.costs(MEDIUM, NOBODY)))}"
    lines += [paragraph(f"""The whole scheduler: the paper {whole.violations} % and ${whole.cost}; here {found} with
        the most central set."""), ""]  # fmt: skip
    lines += head("scheduler", "paper: points more", "here", "same sign", f"all {sets} sets", "paper: cost", "here",
                  "same sign", f"all {sets} sets")  # fmt: skip
    for part, more, times in bars.ablations(page.sets):
        points, between = more.spread.shown(sign=True)
        cost, cost_between = times.spread.shown(digits=2)
        lines.append(row(part.what, part.points, points, more.verdict, f"{between}; {more.sets} of {sets}", part.times,
                         cost, times.verdict, f"{cost_between}; {times.sets} of {sets}"))  # fmt: skip
    return lines_of(*lines)


def experiments(page: Page) -> str:
    """The distance to INFless, with one thing changed at a time."""
    one, hold, at_once = page.central, page.chosen[Reading.HOLD], page.chosen[Reading.AT_ONCE]
    lines = ["## How the distance to INFless changes", "", texts.EXPERIMENTS, ""]
    lines += head("changed", "ours, %", "INFless, %", "points", "times the cost")
    rows: list[tuple[str, Group, System, System]] = [
        (f"nothing ({hold})", MEDIUM, NOBODY, hold),
        (f"whose turn is first ({other_order(hold)})", MEDIUM, NOBODY, other_order(hold)),
        (f"all at once ({at_once})", MEDIUM, NOBODY, at_once),
        (f"all at once, whose turn is first ({other_order(at_once)})", MEDIUM, NOBODY, other_order(at_once)),
        ("all learn", MEDIUM, readings.LEARNS, readings.baseline(page.chosen, Reading.HOLD, Condition.ALL)),
        (BOUND.name, BOUND, NOBODY, hold),
        (f"{BOUND.name}, all learn", BOUND, readings.LEARNS,
         readings.baseline(page.chosen, Reading.HOLD, Condition.ALL)),
        (APART.name, APART, NOBODY, hold),
        ("high load", HIGH, NOBODY, hold),
        ("S = 0.5", at("medium", 0.5), NOBODY, hold),
        ("S = 1.5", at("medium", 1.5), NOBODY, hold),
        *((f"{group.gpus} GPUs instead of {paper.GPUS}", group, NOBODY, hold) for group in FEWER_GPUS),
    ]  # fmt: skip
    for what, group, ours, theirs in rows:
        lines.append(row(what, *(show(estimate(one.violations(group, each))) for each in (ours, theirs)),
                         show(one.more_violations(group, theirs, ours)),
                         show(one.times_the_cost(group, theirs, ours), digits=2)))  # fmt: skip
    points = {what: one.more_violations(group, theirs, ours) for what, group, ours, theirs in rows}
    return lines_of(*lines, "", _widest(points))


def _widest(points: Mapping[str, MeanEstimate]) -> str:
    """What is said below the table: which change has INFless farthest behind, and which least."""
    wanted = bars.FEWER_POINTS[Reading.HOLD]
    most, least = (choose(points, key=lambda each: points[each].mean) for choose in (max, min))
    told = [f"*{what}* ({show(points[what])} points)" for what in (most, least)]
    over = sum(each.low >= wanted for each in points.values())
    return paragraph(f"""INFless is farthest behind with {told[0]}, and least with {told[1]}. The bar of {wanted:g} is
        reached by the interval in {over} of the {len(points)} rows.""")
