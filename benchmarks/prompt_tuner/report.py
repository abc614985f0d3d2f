"""`docs/reproduction/prompttuner.md`, from its record: paper and ours side by side, and what cannot be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from benchmarks.prompt_tuner import bars, index, paper, readings, texts
from benchmarks.prompt_tuner.bars import Bar
from benchmarks.prompt_tuner.cases import (
    APART,
    BOUND,
    FEWER_GPUS,
    HEAVY,
    HIGH,
    MAIN,
    MEDIUM,
    NOBODY,
    Group,
    System,
    at,
    of_bank,
)
from benchmarks.prompt_tuner.grid import Grid, read_grid
from benchmarks.prompt_tuner.parameters import MODELS, Parameters
from benchmarks.prompt_tuner.readings import Condition, Reading
from benchmarks.prompt_tuner.record import Record
from benchmarks.prompt_tuner.search import Anchored
from benchmarks.prompt_tuner.summary import Evaluation, evaluations, over, show
from benchmarks.prompt_tuner.tuning import other_order
from benchmarks.prompt_tuner.why import WHY
from benchmarks.words import head, paragraph, row
from stoker.manager.study.statistics import MeanEstimate, estimate

RECORD = "prompttuner.json"
_TEXT = (Reading.HOLD, Reading.RESIZES)
"""The readings nearest to the text: those that every table has."""


class _Page:
    """A record, and what is asked of it again and again."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.grid: Grid = read_grid()
        self.sets = evaluations(record)
        self.central = self.sets[0]
        self.chosen = record.chosen


def write(record: Record) -> str:
    """The page, in Markdown."""
    page = _Page(record)
    parts = (
        texts.HEAD, _made(page), _short(page), index.write(), _bars(page), _ablations(page), _experiments(page),
        _sets(page), _figure_3c(page), _figure_7(page), _table_7(page), _figure_8(page), _checks(page),
        _settings(page), _workload(page), texts.UNKNOWABLE,
    )  # fmt: skip
    return "\n".join(parts)


def _lines(*lines: str) -> str:
    return "\n".join([*lines, ""])


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def _made(page: _Page) -> str:
    record, sets = page.record, len(page.sets)
    others = f"other sets seeds {_range(record.few)}" if sets > 1 else "no other set was run"
    return _lines(
        paragraph(f"""Made by {record.facts.line()}. Every number of this page is computed from [{RECORD}]({RECORD}),
            which has every run; `make reproduce` goes on where it was stopped. The search had seeds
            {_range(_searched_seeds(page))}, the most central set seeds {_range(record.seeds)},
            {others}.{_early(page)}""")
    )


def _early(page: _Page) -> str:
    """Whether the page was written before the search was over, in words."""
    whole, done = len(page.grid.stages), len(page.record.searched.stages)
    if done in (0, whole):
        return ""
    return (
        f" **The search is not over: {whole - done} of its {whole} stages are missing, and all below is a first look.**"
    )


def _searched_seeds(page: _Page) -> tuple[int, ...]:
    return page.grid.stages[max(0, len(page.record.searched.stages) - 1)].seeds


# ---- in short


def _short(page: _Page) -> str:
    one = page.central
    told = [
        f"{reading.value} {show(one.more_violations(MEDIUM, page.chosen[reading], NOBODY))} points and"
        f" {show(one.times_the_cost(MEDIUM, page.chosen[reading], NOBODY), digits=2)} times the cost"
        for reading in Reading
    ]
    found = list(bars.against_baselines(page.sets, page.chosen, Condition.NOBODY))
    text = [bar for bar in found if any(reading.value in bar.what for reading in _TEXT)]
    both = list(bars.ablations(page.sets))
    signs = sum(bar.holds(bar.found[0]) for _, *pair in both for bar in pair)
    return _lines(
        "## In short",
        "",
        paragraph(f"""Where nobody learns, at medium load and S = 1, ours has
            {show(estimate(one.violations(MEDIUM, NOBODY)))} % of the jobs late (the paper
            {paper.TABLE_8["whole"].violations}, an anchor). Over ours: {"; ".join(told)}.""", bullet=True),
        paragraph(f"""Of the {len(text)} bars against the readings nearest to the text {bars.held(text)} hold by their
            interval; of all {len(found)}, {bars.held(found)}.""", bullet=True),
        paragraph(f"""Of the {2 * len(both)} signs of the ablations {signs} hold by their interval.""", bullet=True),
    )  # fmt: skip


# ---- the bars


def _bars(page: _Page) -> str:
    sets = len(page.sets)
    lines = ["## Bars: nobody learns", "", texts.BARS, ""]
    lines += head("what", "wanted", "the most central set", "holds", f"all {sets} sets", "holds in")
    for bar in bars.against_baselines(page.sets, page.chosen, Condition.NOBODY):
        lines.append(_bar(bar, sets))
    worse = bars.worse_than(page.central, page.chosen)
    lines.append(row("cases in which ours is worse than a baseline, beyond the interval", "none",
                     ", ".join(worse) or "none", "yes" if not worse else "**no**", "", ""))  # fmt: skip
    mean, most = bars.rounds(page.central)
    holds = "yes" if mean.high < 1e3 * bars.ROUND_S else "**no**"
    lines.append(row(f"a round at {paper.LARGE_GPUS} GPUs, where something changed", f"{1e3 * bars.ROUND_S:.0f} ms",
                     f"{show(mean, digits=2)} ms, at most {most:.0f} ms", holds, "", ""))  # fmt: skip
    lines += ["", "## Bars: who learns", "", texts.CONDITIONS, ""]
    conditions = (Condition.ALL, Condition.OURS_ALONE)
    lines += head("what", "wanted", *(cell for one in conditions for cell in (one.value, "holds")))
    columns = [list(bars.against_baselines(page.sets[:1], page.chosen, condition)) for condition in conditions]
    for pair in zip(*columns, strict=True):
        cells = [cell for bar in pair for cell in (show(bar.found[0], digits=bar.digits), bar.verdict)]
        lines.append(row(pair[0].what, f"{pair[0].wanted:g}", *cells))
    ours = [show(estimate(page.central.violations(group, readings.LEARNS))) for group in (MEDIUM, HIGH)]
    alone = [show(estimate(page.central.violations(group, NOBODY))) for group in (MEDIUM, HIGH)]
    cheaper = [show(page.central.times_the_cost(group, NOBODY, readings.LEARNS), digits=2) for group in (MEDIUM, HIGH)]
    lines += ["", paragraph(f"""Learning takes ours from {alone[0]} to {ours[0]} % at medium load and from {alone[1]}
        to {ours[1]} % at high load; without, ours costs {cheaper[0]} and {cheaper[1]} times as much.""")]  # fmt: skip
    return _lines(*lines)


def _bar(bar: Bar, sets: int) -> str:
    shown, between = bar.spread.shown(digits=bar.digits)
    return row(bar.what, f"{bar.wanted:g}", shown, bar.verdict, between, f"{bar.sets} of {sets}")


def _ablations(page: _Page) -> str:
    sets, one = len(page.sets), page.central
    lines = ["## Table 8 and Figure 8: the scheduler without a part", "", texts.ABLATIONS, ""]
    whole = paper.TABLE_8["whole"]
    found = f"{show(estimate(one.violations(MEDIUM, NOBODY)))} % and ${show(estimate(one.costs(MEDIUM, NOBODY)))}"
    lines += [paragraph(f"""The whole scheduler: the paper {whole.violations} % and ${whole.cost}; here {found} with
        the most central set."""), ""]  # fmt: skip
    lines += head("scheduler", "paper: points more", "here", "rises", f"all {sets} sets", "paper: cost", "here",
                  "as the paper has it", f"all {sets} sets")  # fmt: skip
    for part, more, times in bars.ablations(page.sets):
        points, between = more.spread.shown(sign=True)
        cost, cost_between = times.spread.shown(digits=2)
        lines.append(row(part.what, part.points, points, more.verdict, f"{between}; {more.sets} of {sets}", part.times,
                         cost, times.verdict, f"{cost_between}; {times.sets} of {sets}"))  # fmt: skip
    return _lines(*lines)


# ---- what the distance depends on


def _experiments(page: _Page) -> str:
    one, hold, at_once = page.central, page.chosen[Reading.HOLD], page.chosen[Reading.AT_ONCE]
    lines = ["## What keeps the distance to INFless from being the paper's", "", texts.EXPERIMENTS, ""]
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
    ]  # fmt: skip
    for what, group, ours, theirs in rows:
        lines.append(row(what, *(show(estimate(one.violations(group, each))) for each in (ours, theirs)),
                         show(one.more_violations(group, theirs, ours)),
                         show(one.times_the_cost(group, theirs, ours), digits=2)))  # fmt: skip
    return _lines(*lines)


def _sets(page: _Page) -> str:
    record, grid = page.record, page.grid
    said = grid.anchors.said()
    lines = ["## The sets that count", "", texts.SEARCH, "", _searched(page), ""]
    names = list(page.sets[0].choice.values(grid))
    anchors = (
        f"ours late, % ({said[0]})",
        f"ElasticFlow allocated, % ({said[1]:g})",
        f"its cost over ours, S = 1.5 ({said[2]})",
    )
    lines += head(*(f"`{name}`" for name in names), *anchors, "points: holds", "at once", "its cost: holds",
                  "at once")  # fmt: skip
    last = {each.choice: each for stage in record.searched.stages for each in stage}
    for each in page.sets:
        values = [f"{value}" for value in each.choice.values(grid).values()]
        lines.append(row(*values, *_anchored(last.get(each.choice)), *_distances(page, each)))
    return _lines(*lines)


def _searched(page: _Page) -> str:
    searched, grid = page.record.searched, page.grid
    if not searched.stages:
        return "Nobody searched: this is a look."
    told = [
        f"{len(found)} combinations under {'seed' if len(stage.seeds) == 1 else 'seeds'} {_range(stage.seeds)}"
        f" (looked at further within {stage.within:.0%})"
        for stage, found in zip(grid.stages, searched.stages, strict=False)
    ]
    early = _early(page)
    return paragraph(f"""Fixed on {grid.fixed_on}. Measured were {"; ".join(told)}. {len(searched.admitted)} count:
        they are within {searched.within:.0%} of every anchor under the seeds of the last stage (wanted was
        {grid.anchors.within:.0%}). Run were {len(page.sets)}, the most central first.{early}""")


def _anchored(found: Anchored | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    shown = [f"{fmean(values):.{2 if place == 2 else 1}f}" for place, values in enumerate(found.values)]
    return [*shown, *("" for _ in range(3 - len(shown)))]


def _distances(page: _Page, one: Evaluation) -> Iterator[str]:
    both = [page.chosen[reading] for reading in (Reading.HOLD, Reading.AT_ONCE)]
    yield from (show(one.more_violations(MEDIUM, each, NOBODY)) for each in both)
    yield from (show(one.times_the_cost(MEDIUM, each, NOBODY), digits=2) for each in both)


# ---- the figures and tables


def _figure_3c(page: _Page) -> str:
    one, systems = page.central, [NOBODY, *page.chosen.values()]
    lines = ["## Figure 3c: violations by the number of GPUs", "", texts.FIGURE_3C, ""]
    lines += head("GPUs, at most", "ours, %", *(f"{reading.value}, %" for reading in page.chosen))
    lines += [
        row(f"{group.gpus}", *(show(estimate(one.violations(group, system))) for system in systems))
        for group in (*FEWER_GPUS, MEDIUM)
    ]
    return _lines(*lines)


def _figure_7(page: _Page) -> str:
    one, systems = page.central, [NOBODY, *(page.chosen[reading] for reading in _TEXT)]
    names = ["ours", *(reading.value for reading in _TEXT)]
    lines = ["## Figure 7: violations and cost by load and S", "", texts.FIGURE_7, ""]
    lines += head("load, S", *(f"{name}, %" for name in names), *(f"{name}, $" for name in names))
    for group in MAIN:
        late = [show(estimate(one.violations(group, system))) for system in systems]
        lines.append(row(group.name, *late, *(show(estimate(one.costs(group, system))) for system in systems)))
    lines += ["", "![Figure 7](prompttuner-figure-7.png)", "", "Against the paper's words, pairwise by seed:", ""]
    lines += head("what", "paper", "the most central set")
    lines += _said(page)
    return _lines(*lines)


def _said(page: _Page) -> Iterator[str]:
    one = page.central
    for reading in _TEXT:
        low, high = paper.FEWER_POINTS[readings.POLICIES[reading]]
        for load in paper.MAIN_LOADS:
            fewer = one.more_violations(at(load, 1.0), page.chosen[reading], NOBODY)
            yield row(f"7a: points under {reading.value}, {load}", f"{low:.0f} to {high:.0f}", show(fewer))
    for emergence in paper.EMERGENCES:
        for reading in _TEXT:
            fewer = one.more_violations(at("medium", emergence), page.chosen[reading], NOBODY)
            least = f"at least {paper.LEAST_FEWER_POINTS:.0f}"
            yield row(f"7c: points under {reading.value}, S = {emergence:g}", least, show(fewer))
    for emergence, percent in paper.SAVED.items():
        saved = show(one.saved(at("medium", emergence), NOBODY, page.chosen[Reading.HOLD]))
        yield row(f"7d: % saved of INFless's cost, S = {emergence:g}", f"{percent:.0f}", saved)
    for emergence in paper.EMERGENCES:
        last = emergence == paper.EMERGENCES[-1]
        said = f"up to {paper.SAVED_OF_ELASTIC_FLOW:.0f} (an anchor)" if last else "(figure only)"
        saved = show(one.saved(at("medium", emergence), NOBODY, page.chosen[Reading.RESIZES]))
        yield row(f"7d: % saved of ElasticFlow's cost, S = {emergence:g}", said, saved)


def _table_7(page: _Page) -> str:
    one, systems = page.central, [NOBODY, *(page.chosen[reading] for reading in _TEXT)]
    lines = ["## Table 7: large models, and 96 GPUs", "", texts.TABLE_7, ""]
    lines += head("setting", "", "ours", *(reading.value for reading in _TEXT))
    for group in HEAVY:
        said = paper.TABLE_7[group.name]
        late = (f"{said[each.policy].violations} / {said[each.policy].cost}" for each in systems)
        lines.append(row(group.name, "paper: % / $", *late))
        here = (
            f"{show(estimate(one.violations(group, each)))} / {show(estimate(one.costs(group, each)))}"
            for each in systems
        )
        lines.append(row("", f"here, {len(one.results(group, NOBODY))} seeds: % / $", *here))
    return _lines(*lines)


def _figure_8(page: _Page) -> str:
    one = page.central
    lines = ["## Figure 8: reuse by S, the window, the size of the bank", "", texts.FIGURE_8, ""]
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
    return _lines(*lines)


def _beside(one: Evaluation, name: str, group: Group, system: System, usual: Group, *more: str) -> str:
    """A variant beside ours as it is."""
    numbers = [show(estimate(one.violations(group, system))), show(estimate(one.costs(group, system)))]
    if (group, system) == (usual, NOBODY):
        return row(name, *more, *numbers, "", "")
    points = one.more_violations(group, system, NOBODY, where=usual)
    times = one.times_the_cost(group, system, NOBODY, where=usual)
    return row(name, *more, *numbers, show(points, sign=True), show(times, digits=2))


# ---- what it rests on


def _checks(page: _Page) -> str:
    wait, most = paper.INITIALISATION
    lines = ["## What was no anchor, and can be compared", ""]
    lines += head("what", "paper", "the most central set", f"all {len(page.sets)} sets")

    def waits(reading: Reading) -> Callable[[Evaluation], MeanEstimate]:
        return lambda one: estimate([100.0 * run.wait_share for run in one.results(MEDIUM, page.chosen[reading])])

    for reading in (Reading.HOLD, Reading.AT_ONCE):
        central, between = over(page.sets, waits(reading)).shown()
        worst = 100.0 * max(run.wait_most for run in page.central.results(MEDIUM, page.chosen[reading]))
        what = f"{reading.value}: waiting before a job begins, % of its latency (3b; there initialisation alone)"
        lines.append(row(what, f"{wait:.0%}, at most {most:.0%}", f"{central}, at most {worst:.0f}", between))
    mean, longest = bars.rounds(page.central)
    said = "{:.0f} ms, at most {:.0f} ms".format(*(1e3 * seconds for seconds in paper.ROUND_S))
    what = f"a round of scheduling at {paper.LARGE_GPUS} GPUs that has something to look at"
    lines.append(row(what, said, f"{show(mean, digits=2)} ms, at most {longest:.0f} ms", ""))
    return _lines(*lines)


def _settings(page: _Page) -> str:
    lines = ["## The baselines and their settings", "", texts.BASELINES, ""]
    lines += head("reading", "setting", "%", "$", "taken")
    for each in page.record.searches:
        taken = "yes" if page.chosen[each.reading] == each.system else ""
        lines.append(row(each.reading.value, f"{each.system}", f"{each.violations:.1f}", f"{each.cost:.1f}", taken))
    return _lines(*lines)


def _workload(page: _Page) -> str:
    lines = ["## The jobs, and what they depend on", "", texts.WORKLOAD, ""]
    lines += head("parameter", "usual", "most central set", "source", "why")
    usual, mine = Parameters(), page.central.parameters
    for name, why in WHY.items():
        lines.append(row(f"`{name}`", value(getattr(usual, name)), value(getattr(mine, name)), why.source, why.reason))
    lines += ["", texts.MODELS, ""]
    lines += head(
        "model", "GPUs a replica", "weights, GB", "cold start, s", "lookup on one GPU, s", "speedup by the bank"
    )
    for model in MODELS.values():
        cells = (f"{model.devices}", f"{model.weights_bytes / 1e9:g}", f"{mine.cold_s(model):.1f}", f"{model.bank_s}")
        lines.append(row(model.name, *cells, "{} to {}".format(*model.speedup)))
    return _lines(*lines)


def value(what: object) -> str:
    """A parameter as the page shows it."""
    if isinstance(what, tuple):
        return ", ".join(f"{many}: {share:.0%}" for many, share in what)
    return f"{what:.3g}" if isinstance(what, float) and what >= 1e6 else f"{what}"
