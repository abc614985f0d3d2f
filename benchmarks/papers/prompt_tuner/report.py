"""Write `docs/reproduction/prompttuner.md` from its record.

The paper's numbers are differences: percentage points of late jobs, or percent of our cost. A drawn parameter set meets
a number if the error is at most a given share of the number. Two numbers conflict if sets meet each number but no set
meets both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks import quoted_records
from benchmarks.papers import common
from benchmarks.papers.prompt_tuner import paper, scenarios
from benchmarks.papers.prompt_tuner.jobs import MODELS
from benchmarks.papers.prompt_tuner.scenarios import ELASTIC_FLOW, HEAVY, LITERAL, MEDIUM, OURS, PARTS, VICUNA, Group
from benchmarks.papers.prompt_tuner.searching import Book, Evaluation, Record, count_right_signs, mean_text, search
from stoker.manager.study.statistics import MeanEstimate, estimate_mean

PAGE = Path(__file__).with_name("page.template")
RECORD = "prompttuner.json"
BARS = {"infless": (10.0, 1.2), "elastic-flow": (30.0, 1.8)}
"""Our targets, which are below the paper's numbers: percentage points of late jobs, and multiples of our cost."""
Rows = Iterator[list[str]]


class Number(msgspec.Struct, frozen=True):
    """A number of the paper with its computation. `of_parts`: only examined sets have the value."""

    what: str
    low: float
    high: float
    of: Callable[[Evaluation], float]
    of_parts: bool = False

    def deviation(self, value: float) -> float:
        nearest = min(max(value, self.low), self.high)
        return abs(value - nearest) / abs(nearest)

    @property
    def said(self) -> str:
        return f"{self.low:.3g}" if self.low == self.high else f"{self.low:.3g} to {self.high:.3g}"


def _numbers() -> Iterator[Number]:
    late = paper.TABLE_8["whole"].violations
    yield Number("ours late, %", late, late, lambda one: fmean(one.late(MEDIUM)))
    low, high = paper.FEWER_POINTS["infless"]
    yield Number("INFless behind, points", low, high, partial(_fewer_points, LITERAL))
    more = 100.0 / (1.0 - paper.SAVED / 100.0) - 100.0
    yield Number("INFless's cost, % more", more, more, partial(_cost_increase, LITERAL))
    low, high = paper.FEWER_POINTS["elastic-flow"]
    yield Number("ElasticFlow behind, points", low, high, partial(_fewer_points, ELASTIC_FLOW))
    for part in PARTS:
        yield Number(f"{part.what}, points", *part.points, partial(_fewer_points, part.system), of_parts=True)
        low, high = (100.0 * times - 100.0 for times in part.times)
        if max(abs(low), abs(high)) > _SMALL:
            yield Number(f"{part.what}, % of cost", low, high, partial(_cost_increase, part.system), of_parts=True)


def _fewer_points(system: scenarios.System, one: Evaluation) -> float:
    return one.points(MEDIUM, system).mean


def _cost_increase(system: scenarios.System, one: Evaluation) -> float:
    return 100.0 * one.times(MEDIUM, system).mean - 100.0


_SMALL = 2.0
"""Numbers below this percentage of the cost have no limit, because seeds differ by more."""


NUMBERS = tuple(_numbers())
MAIN = NUMBERS[:4]


class Single(msgspec.Struct, frozen=True):
    """A number, index and value of the closest set, and the count of sets within the limit."""

    number: Number
    closest: int
    value: float
    within: int


class Pair(msgspec.Struct, frozen=True):
    """Two numbers, the set closest to both numbers, and the values of this set."""

    numbers: tuple[Number, Number]
    closest: int
    values: tuple[float, float]
    off: float
    conflict: bool


def singles(sets: Sequence[Evaluation], looked_at: Sequence[int], *, limit: float) -> list[Single]:
    found = []
    for number in NUMBERS:
        values = _values(number, sets, looked_at)
        closest = min(values, key=lambda place: number.deviation(values[place]))
        within = sum(number.deviation(value) <= limit for value in values.values())
        found.append(Single(number, closest, values[closest], within))
    return found


def pairs(sets: Sequence[Evaluation], looked_at: Sequence[int], *, limit: float) -> list[Pair]:
    """Return all pairs of main numbers, and all other pairs that conflict."""
    met = {single.number.what for single in singles(sets, looked_at, limit=limit) if single.within}
    found = []
    for one, other in combinations(NUMBERS, 2):
        first, second = _values(one, sets, looked_at), _values(other, sets, looked_at)
        both = first.keys() & second.keys()
        off = {place: max(one.deviation(first[place]), other.deviation(second[place])) for place in both}
        closest = min(sorted(off), key=off.__getitem__)
        conflict = {one.what, other.what} <= met and off[closest] > limit
        if conflict or (one in MAIN and other in MAIN):
            found.append(Pair((one, other), closest, (first[closest], second[closest]), off[closest], conflict))
    return found


def _values(number: Number, sets: Sequence[Evaluation], looked_at: Sequence[int]) -> dict[int, float]:
    places = looked_at if number.of_parts else range(len(sets))
    return {place: number.of(sets[place]) for place in places}


class Page:
    """Runs of the record, on which the search is repeated. Seeds: `one` has all seeds, `some` is for scheduler parts,
    `few` for smaller tables.
    """

    def __init__(self, record: Record) -> None:
        self.grid, self.book = record.grid, Book(record.grid, record.runs)
        self.found = search(self.book)
        judge = record.grid.judge
        self.one, self.some, self.few = (
            Evaluation(self.book, self.found.headline, judge.seeds[:count])
            for count in (None, judge.parts, judge.few)
        )  # fmt: skip
        self.baselines = scenarios.baselines(self.found.tuned)
        self.sets = [Evaluation(self.book, choice, self.grid.search.seeds) for choice in self.found.drawn]
        self.looked_at = [self.found.drawn.index(choice) for choice in self.found.looked_at]
        self.singles = singles(self.sets, self.looked_at, limit=judge.conflict)
        self.pairs = pairs(self.sets, self.looked_at, limit=judge.conflict)

    def without(self, part: scenarios.Part) -> tuple[MeanEstimate, MeanEstimate]:
        """Return late-job points and relative cost of the scheduler without a part."""
        return self.some.points(MEDIUM, part.system), self.some.times(MEDIUM, part.system)

    def allocated(self, group: Group) -> MeanEstimate:
        return estimate_mean([100.0 * run.allocated for run in self.few.runs(group, ELASTIC_FLOW)])


def write(record: Record) -> str:
    page = Page(record)
    grid, headline = page.grid, page.found.headline
    parameters = msgspec.structs.asdict(headline.parameters(grid))
    return common.page(
        PAGE, grid=grid, paper=paper, made=record.facts.line(), **summary(page),
        searched=_seeds_text((*grid.search.seeds, *grid.search.more_seeds)),
        search_seeds=_seeds_text(grid.search.seeds), judged=_seeds_text(grid.judge.seeds),
        bars=bar_rows(page), parts=part_rows(page), heavy=heavy_load_rows(page), vicuna=vicuna_rows(page),
        sets=parameter_set_rows(page),
        finalists="; ".join(_finalists(page)), singles=number_rows(page), pairs=pair_rows(page), literal=LITERAL,
        tuned=page.found.tuned, tuning_seeds=_seeds_text(grid.search.tuning_seeds), models=_model_rows(page),
        induced_prompt=quoted_records.induced_prompt_text(), communication=quoted_records.communication(),
        parameters={name: _value_text(each) for name, each in parameters.items()},
        fixed_costs=quoted_records.fixed_costs(), prompt_spread=quoted_records.prompt_spread(),
        chosen_prompt=quoted_records.chosen_prompt(),
        few=f"{grid.judge.few} seeds" if grid.judge.few > 1 else "1 seed", many=len(grid.judge.seeds),
        others=other_load_rows(page), **bar_shares(page),
        unpaid=mean_text(page.some.times(MEDIUM, PARTS[0].system, waiting=False), digits=2),
        held=f"{fmean(run.waiting_s / run.paid_s for run in page.some.runs(MEDIUM, PARTS[0].system)):.0%}",
    )  # fmt: skip


class Bar(msgspec.Struct, frozen=True):
    """A bar against a baseline at medium load. `paper`: number of the paper, or empty."""

    name: str
    what: str
    wanted: float
    found: MeanEstimate
    paper: str
    digits: int = 1

    @property
    def verdict(self) -> str:
        if self.found.low >= self.wanted:
            return "met"
        return "by the mean only" if self.found.mean >= self.wanted else "**missed**"

    @property
    def text(self) -> str:
        return mean_text(self.found, digits=self.digits)

    @property
    def judged(self) -> str:
        return f"(our bar is {self.wanted:g}: {self.verdict.strip('*')})"


def baseline_bars(page: Page) -> Iterator[Bar]:
    for name, system in page.baselines.items():
        points, times = BARS[system.policy]
        said = "{:g} to {:g}".format(*paper.FEWER_POINTS[system.policy])
        yield Bar(name, "points more late jobs", points, page.one.points(MEDIUM, system), said)
        said = f"{1.0 / (1.0 - paper.SAVED / 100.0):.2f}" if system.policy == "infless" else ""
        yield Bar(name, "times our cost", times, page.one.times(MEDIUM, system), said, 2)


def bar_rows(page: Page) -> Rows:
    for bar in baseline_bars(page):
        yield [bar.name, bar.what, bar.paper, f"{bar.wanted:g}", bar.text, bar.verdict]


def summary(page: Page) -> dict[str, Any]:
    """Return the values in the introduction."""
    grid, late = page.grid, estimate_mean(page.one.late(MEDIUM))
    off, every = grid.search.deviation(late.mean), list(baseline_bars(page))
    signs = [sign == _AS_SAID for both in part_signs(page) for sign in both]
    wrong = "; ".join(_disagreeing_parts(page))
    saved, fewer = page.some.saved(MEDIUM, scenarios.NO_BANK), page.some.points(MEDIUM, scenarios.NO_BANK)
    never = [single.number.what for single in page.singles if not single.within]
    count = sum(pair.conflict for pair in page.pairs)
    conflict = f"""{count} pairs of numbers conflict under {_seeds_text(grid.search.seeds)}: a set meets each number,
        and no set meets both."""
    more = [page.sets[place].points(MEDIUM, PARTS[2].system).mean for place in page.looked_at]
    return {
        "late": mean_text(late), "off": off, "within": "within" if abs(off) <= grid.search.within else "outside",
        "baselines": common.bullets(
            f"{points.name}: {points.text} points more late jobs {points.judged} at {times.text} times the cost"
            f" {times.judged}."
            for points, times in zip(every[::2], every[1::2], strict=True)
        ),
        "right": sum(signs), "signs": len(signs),
        "wrong": f"By the mean, these disagree: {wrong}." if wrong else "By the mean, all agree.",
        "saved": mean_text(saved), "fewer": mean_text(fewer), "drawn": len(page.sets),
        "never": f"these {len(never)} numbers: {'; '.join(never)}" if never else "no single number",
        "conflicts": conflict if count
        else "The other numbers do not conflict in pairs: for each pair, a set is within the limit of both.",
        "budget_points": PARTS[2].points[0], "least_more": min(more), "most_more": max(more), "budget_sets": len(more),
        "few_allocated": mean_text(page.allocated(VICUNA[0])), "many_allocated": mean_text(page.allocated(VICUNA[1])),
    }  # fmt: skip


def _disagreeing_parts(page: Page) -> Iterator[str]:
    for part in PARTS:
        points, times = page.without(part)
        if points.mean <= 0.0:
            yield f"{part.what} {mean_text(points, sign=True)} points"
        if (times.mean > 1.0) != part.dearer:
            yield f"{part.what} {mean_text(times, digits=2)} times the cost"


_AS_SAID = "as in the paper"


def part_signs(page: Page) -> Iterator[tuple[str, str]]:
    """Yield two verdicts per part: on late jobs and on cost."""
    for part in PARTS:
        points, times = page.without(part)
        yield _sign(points, 0.0), _sign(times, 1.0, below=not part.dearer)


def _sign(found: MeanEstimate, neutral: float, *, below: bool = False) -> str:
    if not ((found.mean < neutral) if below else (found.mean > neutral)):
        return "**not as in the paper**"
    return _AS_SAID if (found.high < neutral if below else found.low > neutral) else "by the mean only"


def part_rows(page: Page) -> Rows:
    for part, (sign, cost_sign) in zip(PARTS, part_signs(page), strict=True):
        points, times = page.without(part)
        yield [
            part.what, _range_text(part.points, "+.1f"), mean_text(points, sign=True), sign,
            _range_text(part.times, ".2f"), mean_text(times, digits=2), cost_sign,
        ]  # fmt: skip


def _range_text(said: tuple[float, float], how: str) -> str:
    return " to ".join(f"{value:{how}}" for value in dict.fromkeys(said))


def heavy_load_rows(page: Page) -> Rows:
    systems = (OURS, LITERAL, ELASTIC_FLOW)
    for group in HEAVY:
        late = (mean_text(estimate_mean(page.few.late(group, system))) for system in systems)
        yield [group.name, *late, *(mean_text(page.few.cost(group, system)) for system in systems)]
        said = [paper.TABLE_7[group.name][system.policy] for system in systems]
        numbers = (*(one.violations for one in said), *(one.cost for one in said))
        yield [f"{group.name}, the paper", *(f"{number:g}" for number in numbers)]


def bar_shares(page: Page) -> dict[str, Any]:
    """Take the sets whose late jobs are close enough to the paper. Return which bars these sets meet, by two values of
    a set.
    """
    near = [one for one in page.sets if MAIN[0].deviation(MAIN[0].of(one)) <= page.grid.judge.conflict]
    of = {place: _bars_of(one) for place, one in enumerate(near)}

    def row(what: str, places: Sequence[int]) -> list[str]:
        means = [f"{fmean(of[place][0][n] for place in places):.{digits}f}" for n, digits in enumerate((1, 2, 1, 2))]
        return [what, f"{len(places)}", *means, *(f"{sum(of[place][1][n] for place in places)}" for n in range(4))]

    rows = [row("all", range(len(near)))] if near else []
    for name in ("prepare_s", "widest"):
        values = [float(one.choice.values(page.grid)[name]) for one in near]
        for value in sorted(set(values)):
            rows += [row(f"`{name}` = {value:g}", [place for place, each in enumerate(values) if each == value])]
    both = sum(met[2] and met[3] for _, met in of.values())
    return {"near": len(near), "both": both or "no", "deciding": iter(rows)}


def _bars_of(one: Evaluation) -> tuple[list[float], list[bool]]:
    """Return percentage points and relative cost of INFless (literal) and ElasticFlow, and whether each value meets its
    bar.
    """
    found, met = list[float](), list[bool]()
    for system in (LITERAL, ELASTIC_FLOW):
        values = one.points(MEDIUM, system).mean, one.times(MEDIUM, system).mean
        found += values
        met += [value >= bar for value, bar in zip(values, BARS[system.policy], strict=True)]
    return found, met


def other_load_rows(page: Page) -> Rows:
    for group in scenarios.OTHERS:
        cells = [mean_text(estimate_mean(page.few.late(group)))]
        for system in (LITERAL, ELASTIC_FLOW):
            cells += [mean_text(page.few.points(group, system)), _points_said(group, system)]
            cells += [mean_text(page.few.saved(group, system)), _saved_said(group, system)]
        yield [group.name, *cells]


def _points_said(group: Group, system: scenarios.System) -> str:
    if group.emergence == 1.0:
        return "{:g} to {:g}".format(*paper.FEWER_POINTS[system.policy])
    return f"at least {paper.LEAST_POINTS:g}"


def _saved_said(group: Group, system: scenarios.System) -> str:
    if system == LITERAL:
        return f"{paper.SAVED_AT[group.name]:g}" if group.name in paper.SAVED_AT else ""
    return f"up to {paper.MOST_SAVED:g}" if group.emergence > 1.0 else ""


def vicuna_rows(page: Page) -> Rows:
    mean, most = (100.0 * share for share in paper.INITIALISATION)
    for group in VICUNA:
        runs = page.few.runs(group, LITERAL)
        starts = mean_text(estimate_mean([100.0 * run.start_share for run in runs]))
        longest = 100.0 * max(run.start_most for run in runs)
        allocated = mean_text(page.allocated(group))
        yield [group.name, allocated, "56", f"{starts}, at most {longest:.0f}", f"{mean:.0f}, at most {most:.0f}"]


def parameter_set_rows(page: Page) -> Rows:
    named = {each.closest for each in page.singles} | {each.closest for each in page.pairs} | set(page.looked_at)
    for number, one in enumerate(page.sets, 1):
        if number - 1 not in named:
            continue
        compared = [
            f"{value:.{digits}f}"
            for system in (LITERAL, ELASTIC_FLOW)
            for value, digits in ((one.points(MEDIUM, system).mean, 1), (one.times(MEDIUM, system).mean, 2))
        ]
        yield [
            f"**{number}**" if one.choice == page.found.headline else f"{number}",
            *map(str, one.choice.values(page.grid).values()), f"{fmean(one.late(MEDIUM)):.1f}", *compared,
            f"{count_right_signs(one)} of {2 * len(PARTS)}" if one.choice in page.found.looked_at else "",
        ]  # fmt: skip


def _finalists(page: Page) -> Iterator[str]:
    asked = page.grid.search
    for choice in page.found.finalists:
        late = fmean(Evaluation(page.book, choice, (*asked.seeds, *asked.more_seeds)).late(MEDIUM))
        yield f"set {page.found.drawn.index(choice) + 1} has {late:.1f} % ({asked.deviation(late):+.0%})"


def _seeds_text(numbers: tuple[int, ...]) -> str:
    return f"seeds {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"seed {numbers[0]}"


def number_rows(page: Page) -> Rows:
    for single in page.singles:
        within = f"{single.within} of {len(page.looked_at if single.number.of_parts else page.sets)}"
        yield [single.number.what, single.number.said, f"{single.value:.1f}", f"{single.closest + 1}", within]


def pair_rows(page: Page) -> Rows:
    for pair in page.pairs:
        one, other = pair.numbers
        judged = "met" if pair.off <= page.grid.judge.conflict else "a number alone is not met"
        headline = [number.of(page.some) for number in pair.numbers]
        off = max(number.deviation(value) for number, value in zip(pair.numbers, headline, strict=True))
        shown, here = ("; ".join(f"{value:.1f}" for value in values) for values in (pair.values, headline))
        yield [
            f"{one.what}; {other.what}", f"{one.said}; {other.said}", shown, f"{pair.closest + 1}", f"{pair.off:.0%}",
            "**conflict**" if pair.conflict else judged, f"{here}: off by {off:.0%}",
        ]  # fmt: skip


def _model_rows(page: Page) -> Rows:
    for model in MODELS.values():
        cold_s = page.found.headline.parameters(page.grid).cold_s(model)
        cells = [f"{model.devices}", f"{model.weights_bytes / 1e9:g}", f"{cold_s:.1f}", f"{model.bank_s}"]
        yield [model.name, *cells, "{} to {}".format(*model.speedup)]


def _value_text(what: object) -> str:
    if isinstance(what, tuple):
        return ", ".join(f"{many}: {share:.0%}" for many, share in what)
    return f"{what:.3g}" if isinstance(what, float) and what >= 1e6 else f"{what}"
