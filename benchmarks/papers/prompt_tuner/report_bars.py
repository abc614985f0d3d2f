"""Page sections: figures, Table 7, bars, the scheduler without a part, INFless's difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from benchmarks.papers.prompt_tuner import paper, scenarios
from benchmarks.papers.prompt_tuner.record import TEXT, Evaluation, KeptRun, Page, Spread, show, span
from benchmarks.papers.prompt_tuner.scenarios import (
    APART,
    BOUND,
    FEWER_GPUS,
    HEAVY,
    HIGH,
    INFLESS,
    MAIN,
    MEDIUM,
    NOBODY,
    OF_INFLESS,
    VICUNA,
    Chosen,
    Condition,
    Group,
    Reading,
    System,
    at,
    of_bank,
)
from benchmarks.papers.prompt_tuner.searching import other_order
from benchmarks.tables import head, paragraph, row
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


FEWER_POINTS = {Reading.HOLD: 10.0, Reading.AT_ONCE: 10.0, Reading.RESIZES: 30.0, Reading.FIXED: 30.0}
TIMES_THE_COST = {Reading.HOLD: 1.2, Reading.AT_ONCE: 1.2, Reading.RESIZES: 1.8, Reading.FIXED: 1.8}
ROUND_S = 0.002


class Bar(msgspec.Struct, frozen=True):
    what: str
    wanted: float
    found: tuple[MeanEstimate, ...]
    digits: int = 1
    below: bool = False
    paper: str = ""

    def holds(self, one: MeanEstimate) -> bool:
        return one.high < self.wanted if self.below else one.low >= self.wanted

    def holds_by_mean(self, one: MeanEstimate) -> bool:
        return one.mean < self.wanted if self.below else one.mean >= self.wanted

    @property
    def verdict(self) -> str:
        one = self.found[0]
        return "yes" if self.holds(one) else "by the mean" if self.holds_by_mean(one) else "**no**"

    @property
    def spread(self) -> Spread:
        return Spread(self.found[0], tuple(one.mean for one in self.found))

    @property
    def sets(self) -> int:
        return sum(map(self.holds, self.found))


def against_baselines(sets: Sequence[Evaluation], chosen: Chosen, condition: Condition) -> Iterator[Bar]:
    for reading in Reading:
        ours, theirs = scenarios.ours(condition), scenarios.baseline(chosen, reading, condition)
        for group in (MEDIUM, HIGH):
            fewer = tuple(each.more_violations(group, theirs, ours) for each in sets)
            said = "{:g} to {:g}".format(*paper.FEWER_POINTS[scenarios.POLICIES[reading]])
            what = f"points that fewer jobs are late than under {reading.value}, {group.load} load"
            yield Bar(what, FEWER_POINTS[reading], fewer, paper=said)
        for group in (MEDIUM, HIGH):
            times = tuple(each.times_the_cost(group, theirs, ours) for each in sets)
            has = scenarios.POLICIES[reading] == INFLESS and group == MEDIUM
            said = f"{1.0 / (1.0 - paper.SAVED[MEDIUM.emergence] / 100.0):.2f}" if has else ""
            what = f"times our cost that is paid under {reading.value}, {group.load} load"
            yield Bar(what, TIMES_THE_COST[reading], times, 2, paper=said)


class Part(msgspec.Struct, frozen=True):
    """Our scheduler without a part, and the paper's difference."""

    what: str
    system: System
    points: str
    times: str
    dearer: bool = True


def parts() -> list[Part]:
    whole, found = paper.TABLE_8["whole"], []
    for name, system in scenarios.TABLE_8.items():
        if name != "whole":
            said = paper.TABLE_8[name]
            points, ratio = f"{said.violations - whole.violations:+.1f}", said.cost / whole.cost
            found.append(Part(scenarios.SHOWN[name], system, points, f"{ratio:.2f}", ratio > 1.0))
    low, high = paper.BANK_SAVED
    times = f"{1 / (1 - low / 100):.2f} to {1 / (1 - high / 100):.2f}"
    points = "{:+.0f} to {:+.0f}".format(*paper.BANK_FEWER_POINTS)
    found.append(Part("without the bank", scenarios.NO_PROMPTS, points, times))
    found.append(Part("without reusing runtimes", scenarios.NO_RUNTIMES, "more", "more, less than the bank's"))
    return found


def ablation_bars(sets: Sequence[Evaluation]) -> Iterator[tuple[Part, Bar, Bar]]:
    for part in parts():
        more = tuple(each.more_violations(MEDIUM, part.system, NOBODY) for each in sets)
        times = tuple(each.times_the_cost(MEDIUM, part.system, NOBODY) for each in sets)
        yield part, Bar(part.what, 1e-9, more), Bar(part.what, 1.0, times, 2, below=not part.dearer)


def worse_than(of: Evaluation, chosen: Chosen) -> list[str]:
    return [
        f"{group.name} ({reading.value})"
        for group in MAIN
        for reading in (Reading.HOLD, Reading.RESIZES)
        if of.more_violations(group, NOBODY, chosen[reading]).low > 0.0
    ]


def rounds(of: Evaluation) -> tuple[MeanEstimate, float]:
    large = of.results(HEAVY[-1], NOBODY)
    return estimate([1e3 * run.round_s for run in large]), 1e3 * max(run.round_most_s for run in large)


def held(bars: Sequence[Bar]) -> int:
    return sum(bar.holds(bar.found[0]) for bar in bars)


def against(page: Page) -> str:
    sets = len(page.sets)
    lines = head("what", "paper", "bar", "the most central set", "holds", f"all {sets} sets", "holds in")
    for bar in against_baselines(page.sets, page.chosen, Condition.NOBODY):
        lines.append(_bar(bar, sets))
    worse = worse_than(page.central, page.chosen)
    against = " and ".join(reading.value for reading in TEXT)
    cases = f"of the {len(MAIN) * len(TEXT)} cases of Figure 7 ({against})"
    what = f"{cases}, those in which ours has more late, beyond the interval"
    lines.append(row(what, "none", "none", ", ".join(worse) or "none", "", "", ""))
    mean, most = rounds(page.central)
    holds = "yes" if mean.high < 1e3 * ROUND_S else "**no**"
    said = "{:.0f} ms, at most {:.0f} ms".format(*(1e3 * seconds for seconds in paper.ROUND_S))
    lines.append(row(f"the mean round at {paper.LARGE_GPUS} GPUs where something changed: what the policy computes",
                     said, f"{1e3 * ROUND_S:.0f} ms", f"{show(mean, digits=2)} ms, at most {most:.0f} ms", holds,
                     "", ""))  # fmt: skip
    return "\n".join(lines)


def learning(page: Page) -> str:
    conditions = (Condition.ALL, Condition.OURS_ALONE)
    lines = head("what", "bar", *(cell for one in conditions for cell in (one.value, "holds")))
    columns = [list(against_baselines(page.sets[:1], page.chosen, condition)) for condition in conditions]
    for pair in zip(*columns, strict=True):
        cells = [cell for bar in pair for cell in (show(bar.found[0], digits=bar.digits), bar.verdict)]
        lines.append(row(pair[0].what, f"{pair[0].wanted:g}", *cells))
    ours = [show(estimate(page.central.violations(group, scenarios.LEARNS))) for group in (MEDIUM, HIGH)]
    alone = [show(estimate(page.central.violations(group, NOBODY))) for group in (MEDIUM, HIGH)]
    cheaper = [show(page.central.times_the_cost(group, NOBODY, scenarios.LEARNS), digits=2) for group in (MEDIUM, HIGH)]
    lines += ["", paragraph(f"""Learning takes ours from {alone[0]} to {ours[0]} % at medium load and from {alone[1]}
        to {ours[1]} % at high load; without, ours costs {cheaper[0]} and {cheaper[1]} times as much.""")]  # fmt: skip
    return "\n".join(lines)


def _bar(bar: Bar, sets: int) -> str:
    shown, between = bar.spread.shown(digits=bar.digits)
    return row(bar.what, bar.paper, f"{bar.wanted:g}", shown, bar.verdict, between, f"{bar.sets} of {sets}")


def ablations(page: Page) -> str:
    sets, one, whole = len(page.sets), page.central, paper.TABLE_8["whole"]
    found = f"{show(estimate(one.violations(MEDIUM, NOBODY)))} % and ${show(estimate(one.costs(MEDIUM, NOBODY)))}"
    text = f"""The whole scheduler: the paper {whole.violations} % and ${whole.cost}; here {found} with the most central
        set."""
    both = ("same sign", f"all {sets} sets")
    lines = [paragraph(text), ""]
    lines += head("scheduler", "paper: points more", "here", *both, "paper: cost", "here", *both)
    for part, more, times in ablation_bars(page.sets):
        points, between = more.spread.shown(sign=True)
        cost, cost_between = times.spread.shown(digits=2)
        lines.append(row(part.what, part.points, points, more.verdict, f"{between}; {more.sets} of {sets}", part.times,
                         cost, times.verdict, f"{cost_between}; {times.sets} of {sets}"))  # fmt: skip
    return "\n".join(lines)


def experiments(page: Page) -> str:
    one, hold, at_once = page.central, page.chosen[Reading.HOLD], page.chosen[Reading.AT_ONCE]
    lines = head("changed", "ours, %", "INFless, %", "points", "times the cost")
    rows: list[tuple[str, Group, System, System]] = [
        (f"nothing ({hold})", MEDIUM, NOBODY, hold),
        (f"whose turn is first ({other_order(hold)})", MEDIUM, NOBODY, other_order(hold)),
        (f"all at once ({at_once})", MEDIUM, NOBODY, at_once),
        (f"all at once, whose turn is first ({other_order(at_once)})", MEDIUM, NOBODY, other_order(at_once)),
        ("all learn", MEDIUM, scenarios.LEARNS, scenarios.baseline(page.chosen, Reading.HOLD, Condition.ALL)),
        (BOUND.name, BOUND, NOBODY, hold),
        (f"{BOUND.name}, all learn", BOUND, scenarios.LEARNS,
         scenarios.baseline(page.chosen, Reading.HOLD, Condition.ALL)),
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
    return "\n".join([*lines, "", _widest(points)])


def _widest(points: Mapping[str, MeanEstimate]) -> str:
    wanted = FEWER_POINTS[Reading.HOLD]
    most, least = (choose(points, key=lambda each: points[each].mean) for choose in (max, min))
    told = [f"*{what}* ({show(points[what])} points)" for what in (most, least)]
    over = sum(each.low >= wanted for each in points.values())
    return paragraph(f"""INFless is farthest behind with {told[0]}, and least with {told[1]}. The bar of {wanted:g} is
        reached by the interval in {over} of the {len(points)} rows.""")


_SAID, _MOST = (100.0 * share for share in paper.INITIALISATION)


def compared(page: Page) -> str:
    lines = head("what", "paper", "the most central set", f"all {len(page.sets)} sets", "against the paper's mean")
    for reading in OF_INFLESS:
        lines += [row(*cells) for cells in _waiting(page, reading)]
    mean, longest = rounds(page.central)
    said = "{:.0f} ms, at most {:.0f} ms".format(*(1e3 * seconds for seconds in paper.ROUND_S))
    what = f"a round of scheduling at {paper.LARGE_GPUS} GPUs that has something to look at"
    lines.append(row(what, said, f"{show(mean, digits=2)} ms, at most {longest:.0f} ms", "", ""))
    return "\n".join(lines)


def starts(page: Page, reading: Reading) -> list[MeanEstimate]:
    """Return percent of latency while instances start, by set at medium load; empty if not measured."""
    found = [_starts(one, page, reading, MEDIUM) for one in page.sets]
    return [each for each in found if each is not None] if all(found) else []


def starts_most(page: Page, reading: Reading) -> float:
    return max(100.0 * (run.start_most or 0.0) for run in page.central.results(MEDIUM, page.chosen[reading]))


def _waiting(page: Page, reading: Reading) -> Iterator[tuple[str, ...]]:
    one, system, found = page.central, page.chosen[reading], starts(page, reading)
    paper_has = f"{_SAID:.0f}, at most {_MOST:.0f}"
    if found:
        over = sum(each.mean > _SAID for each in found)
        judged = f"{verdict(found[0], _SAID, _SAID)}; the mean is over it in {over} of {len(found)} sets"
        what = f"{reading.value}: waiting while instances start, % of a job's latency (3b)"
        yield what, paper_has, _told(found[0], starts_most(page, reading)), _between(found), judged
    for group in VICUNA:
        alone = _starts(one, page, reading, group)
        if alone is not None:
            most = max(100.0 * (run.start_most or 0.0) for run in one.results(group, system))
            yield f"the same, {group.name}", paper_has, _told(alone, most), "", verdict(alone, _SAID, _SAID)
    waits = [_shares([run.wait_share for run in each.results(MEDIUM, system)]) for each in page.sets]
    most = 100.0 * max(run.wait_most for run in one.results(MEDIUM, system))
    yield f"{reading.value}: all waiting before a job begins", "", _told(waits[0], most), _between(waits), ""


def _starts(one: Evaluation, page: Page, reading: Reading, group: Group) -> MeanEstimate | None:
    runs: list[KeptRun] = one.runs.get((group.name, str(page.chosen[reading])), [])
    shares = [run.start_share for run in runs if run.start_share is not None]
    return _shares(shares) if shares and len(shares) == len(runs) else None


def _shares(shares: list[float]) -> MeanEstimate:
    return estimate([100.0 * share for share in shares])


def _told(found: MeanEstimate, most: float) -> str:
    return f"{show(found)}, at most {most:.0f}"


def _between(found: list[MeanEstimate]) -> str:
    means = [each.mean for each in found]
    return f"{min(means):.1f} to {max(means):.1f}"
