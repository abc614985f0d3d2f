"""Write `docs/reproduction/prompttuner.md` from its record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks import quoted_records
from benchmarks.papers.prompt_tuner import conflicts, paper
from benchmarks.papers.prompt_tuner.jobs import MODELS
from benchmarks.papers.prompt_tuner.record import Book, Evaluation, Record, mean_text
from benchmarks.papers.prompt_tuner.scenarios import (
    ELASTIC_FLOW,
    HEAVY,
    LITERAL,
    MEDIUM,
    NO_BANK,
    OURS,
    PARTS,
    VICUNA,
    Group,
    Part,
    baselines,
)
from benchmarks.papers.prompt_tuner.searching import count_right_signs, search
from benchmarks.tables import head, paragraph, row
from stoker.manager.study.statistics import MeanEstimate, estimate

PAGE = Path(__file__).with_name("page.template")
RECORD = "prompttuner.json"
BARS = {"infless": (10.0, 1.2), "elastic-flow": (30.0, 1.8)}
"""Our targets, below the numbers of the paper: points of late jobs, and multiples of our cost."""


class Page:
    """Runs of the record with a repeated search. Seeds: `one` has all seeds, `some` is for scheduler parts, `few` for
    smaller tables.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.grid = record, record.grid
        self.book = Book(record.grid, record.runs)
        self.found = search(self.book)
        self.one = Evaluation(self.book, self.found.headline, self.grid.judge.seeds)
        seeds = self.grid.judge.seeds
        self.some = Evaluation(self.book, self.found.headline, seeds[: self.grid.judge.parts])
        self.few = Evaluation(self.book, self.found.headline, seeds[: self.grid.judge.few])
        self.baselines = baselines(self.found.tuned)
        self.sets = [Evaluation(self.book, choice, self.grid.search.seeds) for choice in self.found.drawn]
        self.looked_at = [self.found.drawn.index(choice) for choice in self.found.looked_at]

    def without(self, part: Part) -> tuple[MeanEstimate, MeanEstimate]:
        """Return points and relative cost of the scheduler without a part."""
        return self.some.points(MEDIUM, part.system), self.some.times(MEDIUM, part.system)


def write(record: Record) -> str:
    page = Page(record)
    return PAGE.read_text().format(
        grid=page.grid,
        short=summary(page), made=paragraph(_origin_text(page)), bars=bars(page), parts=parts(page),
        heavy=heavy_load_table(page),
        vicuna=vicuna_table(page), sets=parameter_sets_table(page),
        singles=numbers_table(page), pairs=pairs_table(page), tuning=tuning_text(page),
        models=_models(page), not_ours=paragraph(_own_measurements_text()),
        communication=quoted_records.communication(),
        parameters={name: _value_text(each) for name, each in msgspec.structs.asdict(_parameters(page)).items()},
        fixed_costs=quoted_records.fixed_costs(), prompt_spread=quoted_records.prompt_spread(),
        chosen_prompt=quoted_records.chosen_prompt(), few=_seed_count_text(page.grid.judge.few),
        many=len(page.grid.judge.seeds), some=page.grid.judge.parts,
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
        return verdict(self.found, self.wanted)


def verdict(found: MeanEstimate, wanted: float) -> str:
    if found.low >= wanted:
        return "met"
    return "by the mean only" if found.mean >= wanted else "**missed**"


def baseline_bars(page: Page) -> Iterator[Bar]:
    for name, system in page.baselines.items():
        points, times = BARS[system.policy]
        said = "{:g} to {:g}".format(*paper.FEWER_POINTS[system.policy])
        yield Bar(name, "points more late jobs", points, page.one.points(MEDIUM, system), said)
        said = f"{1.0 / (1.0 - paper.SAVED / 100.0):.2f}" if system.policy == "infless" else ""
        yield Bar(name, "times our cost", times, page.one.times(MEDIUM, system), said, 2)


def bars(page: Page) -> str:
    lines = head("baseline", "what", "paper", "our bar", "here", "")
    for bar in baseline_bars(page):
        lines.append(row(bar.name, bar.what, bar.paper, f"{bar.wanted:g}", mean_text(bar.found, digits=bar.digits),
                         bar.verdict))  # fmt: skip
    return "\n".join(lines)


def summary(page: Page) -> str:
    told = [_paper_claim(), *_findings(page), *_reasons(page)]
    return "\n".join(paragraph(one, bullet=True) for one in told)


def _paper_claim() -> str:
    infless, elastic = ("{:g} to {:g}".format(*paper.FEWER_POINTS[name]) for name in ("infless", "elastic-flow"))
    saved = "{:g} to {:g}".format(*paper.BANK_SAVED)
    return f"""*The paper claims* {infless} points fewer late jobs than INFless and {elastic} points fewer than
        ElasticFlow, and {paper.SAVED:g} % less cost than INFless at S = 1. Each part of its scheduler reduces late
        jobs, and its bank saves {saved} % of the cost."""


def _findings(page: Page) -> Iterator[str]:
    grid, one = page.grid, page.one
    late = estimate(one.late(MEDIUM))
    off = grid.search.deviation(late.mean)
    within = "within" if abs(off) <= grid.search.within else "outside"
    yield f"""*We find*, on {len(grid.judge.seeds)} seeds that the search has not seen, {mean_text(late)} % late jobs
        with our scheduler. The paper has {grid.search.late:g} %: the headline set is {within} its limit of
        {grid.search.within:.0%} ({off:+.0%})."""
    every = list(baseline_bars(page))
    for points, times in zip(every[::2], every[1::2], strict=True):
        yield f"""{points.name}: {mean_text(points.found)} points more late jobs (our bar is {points.wanted:g}:
            {_plain_verdict(points)}) at {mean_text(times.found, digits=2)} times the cost (our bar is {times.wanted:g}:
            {_plain_verdict(times)})."""
    right = [verdict == _AS_SAID for verdicts in part_signs(page) for verdict in verdicts]
    wrong = "; ".join(_disagreeing_parts(page))
    yield f"""Parts of the scheduler: {sum(right)} of {len(right)} signs agree with the paper by the whole interval.
        {f"By the mean, these disagree: {wrong}." if wrong else "By the mean, all agree."}"""
    saved, fewer = page.some.saved(MEDIUM, NO_BANK), page.some.points(MEDIUM, NO_BANK)
    said = "{:g} to {:g} %, {:g} to {:g} points".format(*paper.BANK_SAVED, *paper.BANK_FEWER_POINTS)
    ours = f"{mean_text(saved)} % of the cost and {mean_text(fewer)} points of late jobs"
    yield f"The bank saves {ours} (the paper: {said})."


def _plain_verdict(bar: Bar) -> str:
    return bar.verdict.strip("*")


def _disagreeing_parts(page: Page) -> Iterator[str]:
    for part in PARTS:
        points, times = page.without(part)
        if points.mean <= 0.0:
            yield f"{part.what} {mean_text(points, sign=True)} points"
        if (times.mean > 1.0) != part.dearer:
            yield f"{part.what} {mean_text(times, digits=2)} times the cost"


def _reasons(page: Page) -> Iterator[str]:
    limit = page.grid.judge.conflict
    alone = conflicts.singles(page.sets, page.looked_at, limit=limit)
    never = [single.number.what for single in alone if not single.within]
    both = [pair for pair in conflicts.pairs(page.sets, page.looked_at, limit=limit) if pair.conflict]
    yield f"""*Why it differs*: the paper's trace is not public, so our jobs are drawn from its text. Of
        {len(page.sets)} sets of assumptions, no set is within {limit:.0%} of
        {f"these {len(never)} numbers: {'; '.join(never)}" if never else "no single number"}.
        {_conflicts_text(len(both))}"""
    budget = PARTS[2]
    more = [page.sets[place].points(MEDIUM, budget.system).mean for place in page.looked_at]
    yield f"""The paper's SLOs are minutes (§1, §5.3), and its latency budget reduces late jobs by {budget.points[0]:g}
        points. With a median SLO of {page.grid.slo_s:g} s or more, the budget refuses few lookups or none: without it,
        late jobs change by {min(more):.1f} to {max(more):.1f} points in the {len(more)} sets that ran without it."""
    few, many = (_allocated(page, group) for group in VICUNA)
    yield f"""The paper's 56 % of allocated GPUs under ElasticFlow (Figure 3a) is no anchor any more. It is of Vicuna's
        jobs alone, and the text does not give their number: with 65 jobs we find {mean_text(few)} %, with 195 jobs
        {mean_text(many)} %."""


_AS_SAID = "as in the paper"


def _conflicts_text(count: int) -> str:
    if not count:
        return "The other numbers do not conflict in pairs: for each pair, a set is within the limit of both."
    return f"""{count} pairs of numbers conflict under seed 1 (sets meet each, no set meets both); one seed is weak
        evidence, and the table says what the headline set has under new seeds."""


def part_signs(page: Page) -> Iterator[tuple[str, str]]:
    """Yield verdicts of each part: late jobs and cost."""
    for part in PARTS:
        points, times = page.without(part)
        yield _sign(points, 0.0), _sign(times, 1.0, below=not part.dearer)


def parts(page: Page) -> str:
    lines = head("scheduler", "paper: points", "here", "sign", "paper: times the cost", "here", "sign")
    for part, verdicts in zip(PARTS, part_signs(page), strict=True):
        points, times = page.without(part)
        lines.append(row(
            part.what, _range_text(part.points, "+.1f"), mean_text(points, sign=True), verdicts[0],
            _range_text(part.times, ".2f"), mean_text(times, digits=2), verdicts[1],
        ))  # fmt: skip
    return "\n".join(lines)


def _range_text(said: tuple[float, float], how: str) -> str:
    return " to ".join(f"{value:{how}}" for value in dict.fromkeys(said))


def _sign(found: MeanEstimate, neutral: float, *, below: bool = False) -> str:
    if not ((found.mean < neutral) if below else (found.mean > neutral)):
        return "**not as in the paper**"
    return _AS_SAID if (found.high < neutral if below else found.low > neutral) else "by the mean only"


def heavy_load_table(page: Page) -> str:
    systems = {"ours": OURS, "INFless, literal": LITERAL, "ElasticFlow": ELASTIC_FLOW}
    lines = head("jobs", *(f"{name}: late, %" for name in systems), *(f"{name}: $" for name in systems))
    for group in HEAVY:
        late = [mean_text(estimate(page.few.late(group, system))) for system in systems.values()]
        lines.append(row(group.name, *late, *(mean_text(page.few.cost(group, system)) for system in systems.values())))
        said = [paper.TABLE_7[group.name][system.policy] for system in systems.values()]
        numbers = (f"{number:g}" for number in (*(one.violations for one in said), *(one.cost for one in said)))
        lines.append(row(f"{group.name}, the paper", *numbers))
    return "\n".join(lines)


def vicuna_table(page: Page) -> str:
    mean, most = (100.0 * share for share in paper.INITIALISATION)
    starting = "INFless, literal: instances start, % of latency"
    lines = head("jobs", "ElasticFlow: allocated GPUs, %", "paper (3a)", starting, "paper (3b)")
    for group in VICUNA:
        runs = page.few.runs(group, LITERAL)
        starts = estimate([100.0 * run.start_share for run in runs])
        longest = 100.0 * max(run.start_most for run in runs)
        lines.append(row(group.name, mean_text(_allocated(page, group)), "56",
                         f"{mean_text(starts)}, at most {longest:.0f}", f"{mean:.0f}, at most {most:.0f}"))  # fmt: skip
    return "\n".join(lines)


def _allocated(page: Page, group: Group) -> MeanEstimate:
    return estimate([100.0 * run.allocated for run in page.few.runs(group, ELASTIC_FLOW)])


def parameter_sets_table(page: Page) -> str:
    names = list(page.found.headline.values(page.grid))
    lines = head("set", *(f"`{name}`" for name in names), "ours late, %", "INFless: points", "times the cost",
                 "ElasticFlow: points", "times the cost", "right signs")  # fmt: skip
    for number, one in enumerate(page.sets, 1):
        values = (f"{value}" for value in one.choice.values(page.grid).values())
        chosen = f"**{number}**" if one.choice == page.found.headline else f"{number}"
        right = f"{count_right_signs(one).right} of {2 * len(PARTS)}" if one.choice in page.found.looked_at else ""
        lines.append(row(
            chosen, *values, f"{fmean(one.late(MEDIUM)):.1f}", f"{one.points(MEDIUM, LITERAL).mean:.1f}",
            f"{one.times(MEDIUM, LITERAL).mean:.2f}", f"{one.points(MEDIUM, ELASTIC_FLOW).mean:.1f}",
            f"{one.times(MEDIUM, ELASTIC_FLOW).mean:.2f}", right,
        ))  # fmt: skip
    return "\n".join([*lines, "", paragraph(_finalists(page))])


def _finalists(page: Page) -> str:
    seeds = (*page.grid.search.seeds, *page.grid.search.more_seeds)
    told = []
    for choice in page.found.finalists:
        late = fmean(Evaluation(page.book, choice, seeds).late(MEDIUM))
        told.append(
            f"set {page.found.drawn.index(choice) + 1} has {late:.1f} % ({page.grid.search.deviation(late):+.0%})"
        )
    return f"""Finalists, over {_seeds_text(seeds)}: {"; ".join(told)}. The headline set is in bold."""


def _seed_count_text(seeds: int) -> str:
    return f"{seeds} seeds" if seeds > 1 else "1 seed"


def _seeds_text(numbers: tuple[int, ...]) -> str:
    return f"seeds {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"seed {numbers[0]}"


def numbers_table(page: Page) -> str:
    limit = page.grid.judge.conflict
    lines = head("number", "paper", "closest", "in set", f"sets within {limit:.0%}")
    for single in conflicts.singles(page.sets, page.looked_at, limit=limit):
        count = len(page.looked_at if single.number.of_parts else page.sets)
        lines.append(row(single.number.what, single.number.said, f"{single.value:.1f}", f"{single.closest + 1}",
                         f"{single.within} of {count}"))  # fmt: skip
    return "\n".join(lines)


def pairs_table(page: Page) -> str:
    limit = page.grid.judge.conflict
    lines = head("pair", "paper", "closest to both", "in set", "off by at most", "", "headline set, new seeds")
    for pair in conflicts.pairs(page.sets, page.looked_at, limit=limit):
        one, other = pair.numbers
        judged = "**conflict**" if pair.conflict else "met" if pair.off <= limit else "a number alone is not met"
        values = "; ".join(f"{value:.1f}" for value in pair.values)
        lines.append(row(f"{one.what}; {other.what}", f"{one.said}; {other.said}", values, f"{pair.closest + 1}",
                         f"{pair.off:.0%}", judged, _headline_pair_text(page, pair)))  # fmt: skip
    return "\n".join(lines)


def _headline_pair_text(page: Page, pair: conflicts.Pair) -> str:
    """Return text on how far the headline set misses a pair of numbers under the seeds of scheduler parts."""
    values = [number.of(page.some) for number in pair.numbers]
    off = max(number.deviation(value) for number, value in zip(pair.numbers, values, strict=True))
    return f"{'; '.join(f'{value:.1f}' for value in values)}: off by {off:.0%}"


def tuning_text(page: Page) -> str:
    return paragraph(f"""*INFless, literal* is `{LITERAL}`. *INFless, tuned* is `{page.found.tuned}`: the best of 8
        settings with the headline set under {_seeds_text(page.grid.search.tuning_seeds)}. No source gives INFless the
        order of deadlines or a margin of 0; the tuned reading shows what they are worth.""")


def _origin_text(page: Page) -> str:
    judge, searched = page.grid.judge, (*page.grid.search.seeds, *page.grid.search.more_seeds)
    return f"""Made by {page.record.facts.line()}. All numbers are computed from [{RECORD}]({RECORD}), which has every
        run. `make reproduce` repeats the runs. The settings were fixed on {page.grid.fixed_on}, before the first
        run, in `benchmarks/papers/prompt_tuner/grid.toml`. The search used {_seeds_text(searched)};
        medium load at S = 1 is judged on {_seeds_text(judge.seeds)}, the scheduler's parts on the first
        {judge.parts} of them, other tables on the first {judge.few}. Some of these numbers were made smaller
        while runs were under way, as `grid.toml` says."""


def _parameters(page: Page) -> msgspec.Struct:
    return page.found.headline.parameters(page.grid)


def _models(page: Page) -> str:
    lines = head(
        "model", "GPUs a replica", "weights, GB", "cold start, s", "lookup on one GPU, s", "speedup by the bank"
    )
    for model in MODELS.values():
        cold_s = f"{page.found.headline.parameters(page.grid).cold_s(model):.1f}"
        cells = (f"{model.devices}", f"{model.weights_bytes / 1e9:g}", cold_s, f"{model.bank_s}")
        lines.append(row(model.name, *cells, "{} to {}".format(*model.speedup)))
    return "\n".join(lines)


def _own_measurements_text() -> str:
    return f"""Our own measurements, with another model, do not give two of these numbers: for `speedup`,
        {quoted_records.induced_prompt_text()}; for `gang_efficiency`, {quoted_records.communication()}."""


def _value_text(what: object) -> str:
    if isinstance(what, tuple):
        return ", ".join(f"{many}: {share:.0%}" for many, share in what)
    return f"{what:.3g}" if isinstance(what, float) and what >= 1e6 else f"{what}"
