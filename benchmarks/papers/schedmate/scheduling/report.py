"""Write `docs/reproduction/schedmate.md` and its figure from the records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.harness import ROOT
from benchmarks.papers.common import table, wrapped_text
from benchmarks.papers.schedmate.scheduling import errors, intervals, settings, simulate
from benchmarks.papers.schedmate.scheduling.intervals import Interval
from benchmarks.papers.schedmate.scheduling.records import Records, WindowFacts
from benchmarks.papers.schedmate.scheduling.simulate import FIFO, OURS, SHUFFLED, SJF, TIRESIAS
from stoker.manager.advice.logs.opinion import DOUBTED
from stoker.manager.study.plots import COLORS, style
from stoker.whole_files import draft_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PAGE = Path(__file__).with_name("page.template")
MODEL_RECORD = ROOT / "benchmarks" / "records" / "schedmate-language-model.json"
PREDICTING = {
    simulate.OURS: "shortest first, our error",
    simulate.PAPER: "shortest first, SchedMate's error",
    simulate.LUCID: "shortest first, Lucid's error",
    simulate.SHUFFLED: "shortest first, shuffled predictions",
    simulate.SJF: "SJF (no error)",
    simulate.OUR_AVERAGE: "shortest first, average of similar recipes",
    simulate.OURS_UNKNOWN: "shortest first, our error, 30 % of jobs without an estimate",
    simulate.FIFO_SKIP: "FIFO, others may pass",
    simulate.SJF_SKIP: "SJF, others may pass",
    simulate.OURS_SKIP: "shortest first, our error, others may pass",
    simulate.TIRESIAS_OTHER: "Tiresias with three queues",
    simulate.TIRESIAS_FREE: "Tiresias, preempting costs nothing",
}
"""Names of systems on the page that differ from our names."""


class Cells:
    """Results of systems with intervals. `places`: indices of windows (None: all)."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.strata, self.jobs = records.strata, records.jobs

    def mean_s(self, system: str, load: float, what: str = "mean_s", places: tuple[int, ...] | None = None) -> Interval:
        values = self.records.of(system, what, load=load)
        return intervals.interval(intervals.pooled_mean(values, self.jobs), self.strata, places)

    def _both(self, system: str, other: str, load: float) -> list[list[float]]:
        return [self.records.of(each, "mean_s", load=load) for each in (system, other)]

    def ratio(self, system: str, other: str, load: float, places: tuple[int, ...] | None = None) -> Interval:
        ours, theirs = self._both(system, other, load)
        return intervals.interval(intervals.pooled_ratio(ours, theirs, self.jobs), self.strata, places)

    def ratio_of_weeks(self, system: str, other: str, load: float) -> Interval:
        return intervals.interval(intervals.mean_ratio(*self._both(system, other, load)), self.strata)

    def typical_s(self, system: str, what: str, load: float) -> Interval:
        values = self.records.of(system, what, load=load)
        return intervals.interval(intervals.geometric_mean(values), self.strata)

    def worse_weeks(self, system: str, other: str, load: float, places: Iterable[int]) -> list[float]:
        """Return ratios of weeks in which a system is more than 1 % slower than another system."""
        ours, theirs = self._both(system, other, load)
        return sorted(ours[place] / theirs[place] for place in places if ours[place] > 1.01 * theirs[place])

    def places_of(self, cluster: str) -> tuple[int, ...]:
        return tuple(place for place, each in enumerate(self.strata) if each == cluster)


def write(records: Records) -> str:
    cells, kept, windows = Cells(records), records.kept, records.kept.windows
    paper_spread, lucid_spread = (errors.spread_of(share) for share in (settings.PAPER_SHARE, settings.LUCID_SHARE))
    real = (fmean(window.gpus_at_work / window.gpus[at] for window in windows) for at in range(len(settings.LOADS)))
    text = PAGE.read_text().format(
        settings=settings, kept=kept, bars=bars(cells), **findings(cells), **with_model(),
        main=_systems(cells, simulate.MAIN),
        by_load=by_load(cells), by_cluster=by_cluster(cells), sweep=sweep(cells), hidden=hidden(cells),
        beside=_systems(cells, simulate.BESIDE), windows=windows_table(windows),
        passing=cells.ratio(simulate.OURS_SKIP, simulate.FIFO_SKIP, settings.MAIN_LOAD).text(),
        real_loads=", ".join(f"{load:.2f}" for load in real), shuffled_share=percent(kept.errors[SHUFFLED].under_100),
        paper_share=percent(settings.PAPER_SHARE), lucid_share=percent(settings.LUCID_SHARE),
        paper_spread=paper_spread, lucid_spread=lucid_spread, lucid_factor=math.exp(lucid_spread**2 / 2),
        paper_both=errors.spread_both_ways(settings.PAPER_SHARE),
        lucid_both=errors.spread_both_ways(settings.LUCID_SHARE),
        weeks_all=len(windows), clusters=len(set(cells.strata)), jobs=sum(window.jobs for window in windows),
        took_min=sum(result.took_s for result in kept.runs) / 60, peak_gb=kept.peak_bytes / 1e9,
    )  # fmt: skip
    return wrapped_text(text)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def summary(records: Records) -> dict[str, dict[str, tuple[float, float, float]]]:
    cells, found = Cells(records), dict[str, dict[str, tuple[float, float, float]]]()
    for load in settings.LOADS:
        for system in simulate.MAIN:
            several = {
                "completion_mean_s": cells.mean_s(system, load),
                "over_fifo": cells.ratio(system, FIFO, load),
                "over_tiresias": cells.ratio(system, TIRESIAS, load),
            }
            found[f"{system}/{load:g}"] = {
                name: (round(one.value, 4), round(one.low, 4), round(one.high, 4)) for name, one in several.items()
            }
    return found


def named(system: str) -> str:
    return PREDICTING.get(system, system)


def bars(cells: Cells) -> str:
    load = settings.MAIN_LOAD
    everywhere = [(f"load {each:g}", cells.ratio(OURS, FIFO, each)) for each in settings.LOADS]
    everywhere += [
        (f"`{cluster}`, load {each:g}", cells.ratio(OURS, FIFO, each, cells.places_of(cluster)))
        for each in settings.LOADS
        for cluster in dict.fromkeys(cells.strata)
    ]
    worse = [f"{name}: {ratio.text()}" for name, ratio in everywhere if ratio.is_above_one]
    verdict = f"yes, in all {len(everywhere)}" if not worse else f"**no**: {'; '.join(worse)}"
    to_fifo, to_tiresias = (cells.ratio(OURS, other, load) for other in (FIFO, TIRESIAS))
    rows = [
        ["mean completion time, shortest first with our error over FIFO", to_fifo.text(3), "reported"],
        ["the same over Tiresias", to_tiresias.text(3), "reported"],
        *(_against_tiresias(cells, each) for each in settings.LOADS),
        ["never worse than FIFO beyond its interval: at no load, in no virtual cluster", "", verdict],
    ]
    return table(("bar", f"here, load {load:g}", "met"), rows)


def _against_tiresias(cells: Cells, load: float) -> list[str]:
    jobs, weeks = cells.ratio(OURS, TIRESIAS, load), cells.ratio_of_weeks(OURS, TIRESIAS, load)
    verdict = "yes" if max(jobs.high, weeks.high) < 1 else "**not reproduced**"
    found = f"{jobs.text()}; by weeks {weeks.text()}"
    return [f"{settings.PAPER_OVER_TIRESIAS:g} of Tiresias's (§5.3), at load {load:g}", found, verdict]


def findings(cells: Cells) -> dict[str, str]:
    load = settings.MAIN_LOAD
    costs = [
        f"{name} {100 * (ratio.value - 1):.0f} % ({100 * (ratio.low - 1):.0f} to {100 * (ratio.high - 1):.0f})"
        for name, system in (("ours", OURS), ("SchedMate's", simulate.PAPER), ("Lucid's", simulate.LUCID))
        for ratio in (cells.ratio(system, SJF, load),)
    ]
    places = range(len(cells.strata))
    worse = sorted(ratio for each in settings.LOADS for ratio in cells.worse_weeks(OURS, FIFO, each, places))
    count = f"{len(places)} weeks at {len(settings.LOADS)} loads"
    weeks = f"{len(worse)} of {count}, by {100 * (worse[-1] - 1):.0f} % at most" if worse else f"none of {count}"
    return {
        "costs": ", ".join(costs),
        "weeks": weeks,
        "ours_short": f"{cells.ratio(OURS, FIFO, load).value:.2f}",
        "tiresias_short": f"{cells.ratio(OURS, TIRESIAS, load).value:.2f}",
        "tiresias_weeks_short": f"{cells.ratio_of_weeks(OURS, TIRESIAS, load).value:.2f}",
        "sjf_short": f"{cells.ratio(SJF, TIRESIAS, load).value:.2f}",
        "sjf_weeks_short": f"{cells.ratio_of_weeks(SJF, TIRESIAS, load).value:.2f}",
    }


def with_model() -> dict[str, str]:
    """Return the parts of the page about the language model, from the record."""
    kept = json.loads(MODEL_RECORD.read_text())
    lines, failures = kept["lines"], kept["failures"]
    rows = [
        [name, *(f"{100 * found['all'][part]:.1f} %" for part in ("found", "right", "rates_found"))]
        for name, found in lines.items()
    ]
    verdicts = [
        [table_name, name, *(str(found[part]) for part in ("f1", "precision", "accuracy"))]
        for table_name, scores in failures.items()
        if isinstance(scores, dict)
        for name, found in scores.items()
        if isinstance(found, dict)
    ]
    strict = failures["without rows that know the test's texts"]
    metrics = 100 * (lines["rules and model"]["all"]["found"] - lines["rules"]["all"]["found"])
    changes = (
        f"{part} {strict['rules and model'][part] - strict['rules'][part]:+.1f}"
        for part in ("f1", "precision", "accuracy")
    )
    bars_met = lines["model alone"]["all"]["found"] >= 0.84, strict["rules and model"]["f1"] >= settings.PAPER_F1
    doubted = [str(failures[name]["doubted"]) for name in failures if name != "questions"]
    return {
        "model": f"`{kept['model']}` (SmolLM2-135M-Instruct, 4 bits)",
        "rules_found": f"{100 * lines['rules']['all']['found']:.1f} %",
        "right_found": f"{100 * lines['right answers alone']['all']['found']:.1f} %",
        "rules_f1": str(strict["rules"]["f1"]),
        "right_f1": str(strict["an opinion that is always right"]["f1"]),
        "model_changes": ", ".join((f"metrics found {metrics:+.1f}", *changes)).replace("f1", "F1"),
        "model_bars": ", ".join(
            f"bar of {bar} {'met' if is_met else 'missed'}"
            for bar, is_met in zip(("84 %", "67.7"), bars_met, strict=True)
        ),
        "doubted": f"{100 * DOUBTED:.0f} %",
        "lines_with_model": table(("lines of ten held-out formats", "found", "right", "rates found"), rows),
        "failures_with_model": table(("rules", "verdicts", "F1", "precision", "accuracy"), verdicts),
        "doubted_logs": " and ".join(doubted),
        "questions": str(failures["questions"]),
        "believed": str(sum(failures[name]["believed"] for name in failures if name != "questions")),
    }


def _systems(cells: Cells, which: Sequence[str]) -> str:
    load, rows = settings.MAIN_LOAD, []
    for system in which:
        preempted = sum(cells.records.of(system, "preempted", load=load)) / sum(cells.jobs)
        rows.append([
            named(system), cells.mean_s(system, load).text(), cells.mean_s(system, load, "wait_s").text(),
            cells.typical_s(system, "p50_s", load).text(0), cells.typical_s(system, "p95_s", load).text(0),
            *("1" if system == other else cells.ratio(system, other, load).text() for other in (FIFO, TIRESIAS)),
            *(
                "1" if system == other else cells.ratio_of_weeks(system, other, load).text()
                for other in (FIFO, TIRESIAS)
            ),
            f"{preempted:.2f}" if preempted else "",
        ])  # fmt: skip
    columns = (
        "policy", "completion, mean, s", "waiting, mean, s", "p50 of a week, s", "p95 of a week, s", "over FIFO",
        "over Tiresias", "over FIFO, by weeks", "over Tiresias, by weeks", "preemptions a job",
    )  # fmt: skip
    return table(columns, rows)


def by_load(cells: Cells) -> str:
    rows = []
    for system in simulate.MAIN:
        if system != FIFO:
            row = [named(system), *(cells.ratio(system, FIFO, load).text() for load in settings.LOADS)]
            row += [
                "1" if system == TIRESIAS else cells.ratio(system, TIRESIAS, load).text() for load in settings.LOADS
            ]
            rows.append(row)
    columns = (
        "policy", *(f"over FIFO, {load:g}" for load in settings.LOADS),
        *(f"over Tiresias, {load:g}" for load in settings.LOADS),
    )  # fmt: skip
    return table(columns, rows)


def by_cluster(cells: Cells) -> str:
    load, rows = settings.MAIN_LOAD, []
    gpus_of = settings.LOADS.index(load)
    for cluster in dict.fromkeys(cells.strata):
        places = cells.places_of(cluster)
        windows = [cells.records.kept.windows[place] for place in places]
        gpus = sorted(window.gpus[gpus_of] for window in windows)
        worse = cells.worse_weeks(OURS, FIFO, load, places)
        rows.append([
            f"`{cluster}`", str(len(places)), f"{sum(window.jobs for window in windows):,}", f"{gpus[0]} to {gpus[-1]}",
            cells.mean_s(FIFO, load, "wait_s", places).text(0), cells.ratio(OURS, FIFO, load, places).text(),
            cells.ratio(OURS, TIRESIAS, load, places).text(), cells.ratio(OURS, SJF, load, places).text(),
            f"{len(worse)} ({', '.join(f'{ratio:.2f}' for ratio in worse)})" if worse else "0",
        ])  # fmt: skip
    columns = (
        "cluster", "weeks", "jobs", "GPUs", "FIFO: waiting, mean, s", "ours over FIFO", "over Tiresias", "over SJF",
        "weeks worse than FIFO by over 1 % (their ratios)",
    )  # fmt: skip
    return table(columns, rows)


def sweep(cells: Cells) -> str:
    rows, load = [], settings.MAIN_LOAD
    for system in (SJF, *simulate.SWEEP, simulate.SHUFFLED):
        shares = cells.records.kept.errors[system]
        rows.append([
            "0" if system == SJF else system.removeprefix("spread "),
            percent(shares.under_100), percent(shares.within_two),
            cells.ratio(system, FIFO, load).text(), cells.ratio_of_weeks(system, FIFO, load).text(),
            *(
                "1" if system == SJF else ratio(system, SJF, load).text()
                for ratio in (cells.ratio, cells.ratio_of_weeks)
            ),
        ])  # fmt: skip
    columns = (
        "spread", "errors under 100 %", "within a factor of two", "over FIFO", "by weeks", "over SJF", "by weeks"
    )  # fmt: skip
    return table(columns, rows)


def hidden(cells: Cells) -> str:
    which = (OURS, simulate.OUR_AVERAGE, simulate.PAPER, simulate.LUCID, simulate.SHUFFLED)
    shares, load = cells.records.kept.errors, settings.MAIN_LOAD
    rows = [
        [
            named(system), percent(shares[system].under_100), percent(shares[system].within_two),
            cells.ratio(system, FIFO, load).text(),
        ]
        for system in which
    ]  # fmt: skip
    columns = ("predictions", "errors under 100 %", "within a factor of two", "over FIFO")
    return table(columns, rows)


def windows_table(windows: Sequence[WindowFacts]) -> str:
    rows = [
        [
            f"`{window.cluster}`", str(window.week + 1), f"{window.jobs:,}", f"{window.duration_s:,.0f}",
            f"{window.gpus_at_work:.1f}", *map(str, window.gpus),
        ]
        for window in windows
    ]  # fmt: skip
    columns = (
        "cluster", "week", "jobs", "duration, mean, s", "GPUs at work",
        *(f"GPUs, load {load:g}" for load in settings.LOADS),
    )  # fmt: skip
    return table(columns, rows)


FIGURE = "schedmate-figure.png"
_DOTS_PER_INCH = 110
_NAMED = {simulate.OURS: "ours", simulate.PAPER: "SchedMate's", simulate.LUCID: "Lucid's"}


def draw(folder: Path, records: Records) -> Path:
    cells, path = Cells(records), folder / FIGURE
    with style() as figure_of:
        figure = figure_of(figsize=(7.6, 3.2), layout="constrained")
        all_jobs, by_weeks = figure.subplots(1, 2, sharey=True)
        load = settings.MAIN_LOAD
        _panel(all_jobs, lambda system: cells.ratio(system, simulate.FIFO, load), title="over all jobs")
        _panel(by_weeks, lambda system: cells.ratio_of_weeks(system, simulate.FIFO, load), title="each week alike")
        all_jobs.set_ylabel("mean completion time over FIFO's")
        by_weeks.legend(fontsize=7.5, loc="lower right")
        with draft_of(path) as draft:
            figure.savefig(draft, dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return path


def spreads() -> dict[str, float]:
    ratios = errors.our_log_ratios()["estimates"]
    middle = sum(ratios) / len(ratios)
    ours = (sum((ratio - middle) ** 2 for ratio in ratios) / len(ratios)) ** 0.5
    paper, lucid = (errors.spread_of(share) for share in (settings.PAPER_SHARE, settings.LUCID_SHARE))
    return {simulate.OURS: ours, simulate.PAPER: paper, simulate.LUCID: lucid}


def _panel(axes: Axes, ratio: Callable[[str], Interval], *, title: str) -> None:
    axes.set_title(title)
    line = {simulate.SJF: 0.0, **dict(zip(simulate.SWEEP, settings.SPREADS, strict=True))}
    found = [ratio(system) for system in line]
    axes.errorbar([*line.values()], [one.value for one in found], yerr=_bars(found), color=COLORS[0], marker="o",
                  markersize=3.5, elinewidth=0.9, label="lognormal error")  # fmt: skip
    for place, (system, spread) in enumerate(spreads().items(), 1):
        one = ratio(system)
        axes.errorbar([spread], [one.value], yerr=_bars([one]), color=COLORS[place], marker="s", markersize=5.0,
                      elinewidth=0.9, linestyle="none", label=_NAMED[system])  # fmt: skip
    for system, dashes, color in ((simulate.TIRESIAS, "--", "#404040"), (simulate.SHUFFLED, ":", "#404040")):
        one = ratio(system)
        axes.axhline(one.value, linestyle=dashes, color=color, linewidth=1.1, label=system)
    axes.axhline(1.0, color="#999999", linewidth=0.9)
    axes.set_xlabel("spread of log(prediction / truth)")
    axes.set_ylim(bottom=0.0)


def _bars(found: list[Interval]) -> list[list[float]]:
    return [[one.value - one.low for one in found], [one.high - one.value for one in found]]
