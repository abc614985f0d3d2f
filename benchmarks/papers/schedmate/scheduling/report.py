"""Write `docs/reproduction/schedmate.md` and its figure from the records.

Intervals come from a paired bootstrap: weeks are drawn with replacement within each virtual cluster. All systems get
the same weeks. An interval contains the middle 95 % of 2,000 resampled values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import RECORDS
from benchmarks.papers.common import Store, page
from benchmarks.papers.schedmate.scheduling import errors, settings, simulate
from benchmarks.papers.schedmate.scheduling.simulate import FIFO, LUCID, OURS, PAPER, SHUFFLED, SJF, TIRESIAS
from stoker.chance import Stream
from stoker.manager.advice.logs.opinion import OPINION_BELOW
from stoker.manager.study.plots import COLORS, plot_style
from stoker.whole_files import draft_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = Path(__file__).with_name("page.template")
FIGURE = "schedmate-figure.png"
NAMED = {
    OURS: "shortest first, our error", PAPER: "shortest first, SchedMate's error",
    LUCID: "shortest first, Lucid's error", SHUFFLED: "shortest first, shuffled predictions", SJF: "SJF (no error)",
    simulate.OUR_AVERAGE: "shortest first, average of similar recipes",
    simulate.OURS_UNKNOWN: "shortest first, our error, 30 % of jobs without an estimate",
    simulate.FIFO_SKIP: "FIFO, others may pass", simulate.SJF_SKIP: "SJF, others may pass",
    simulate.OURS_SKIP: "shortest first, our error, others may pass",
    simulate.TIRESIAS_OTHER: "Tiresias with three queues",
    simulate.TIRESIAS_FREE: "Tiresias, preempting costs nothing", FIFO: FIFO, TIRESIAS: TIRESIAS,
}  # fmt: skip
Rows = Iterator[list[str]]
Records = Store[simulate.Case, simulate.CaseResult]
LOAD = settings.MAIN_LOAD


Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
"""Indices of windows: one row in total or per resample."""
Of = Callable[[Places], Numbers]


class Interval(msgspec.Struct, frozen=True):
    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        shown = 0 if abs(self.value) >= 1000 else digits
        value, low, high = (f"{each:,.{shown}f}" for each in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


@lru_cache(maxsize=64)
def resamples(strata: tuple[str, ...], chosen: tuple[int, ...]) -> Places:
    groups: dict[str, list[int]] = {}
    for place in chosen:
        groups.setdefault(strata[place], []).append(place)
    chance, number, found = Stream(settings.SEED, "bootstrap"), 0, []
    for _ in range(settings.RESAMPLES):
        drawn: list[int] = []
        for members in groups.values():
            drawn += [members[int(chance.uniform(number + which) * len(members))] for which in range(len(members))]
            number += len(members)
        found.append(drawn)
    return np.array(found)


def interval(of: Of, strata: tuple[str, ...], chosen: tuple[int, ...] | None = None) -> Interval:
    places = tuple(range(len(strata))) if chosen is None else chosen
    tail = (1 - settings.CONFIDENCE) / 2
    low, high = np.quantile(of(resamples(strata, places)), [tail, 1 - tail])
    return Interval(float(of(np.array([places]))[0]), float(low), float(high))


def pooled_mean(values: Sequence[float], jobs: Sequence[float]) -> Of:
    sums, counts = np.array(values) * np.array(jobs), np.array(jobs)
    return lambda places: sums[places].sum(axis=1) / counts[places].sum(axis=1)


def geometric_mean(values: Sequence[float] | Numbers) -> Of:
    logs = np.log(values)
    return lambda places: np.exp(logs[places].mean(axis=1))


class Cells:
    """Results of systems with intervals. `places`: indices of the used windows (None: all)."""

    def __init__(self, records: Records) -> None:
        self.kept, self._found = records.kept, records.found
        self.strata = tuple(window.cluster for window in self.kept.windows)
        self.jobs = [float(window.jobs) for window in self.kept.windows]

    def of(self, system: str, what: str, load: float = LOAD) -> list[float]:
        """Return a field of `Measures` for each window, averaged over draws."""
        runs = [self._found[simulate.Case(system, load, draw).name].windows for draw in range(simulate.draws(system))]
        return [fmean(getattr(one, what) for one in several) for several in zip(*runs, strict=True)]

    def mean_s(self, system: str, what: str = "mean_s", *, places: tuple[int, ...] | None = None) -> Interval:
        return interval(pooled_mean(self.of(system, what), self.jobs), self.strata, places)

    def ratio(
        self, system: str, other: str, load: float = LOAD, places: tuple[int, ...] | None = None, *, weeks: bool = False
    ) -> Interval:
        ours, theirs = (self.of(each, "mean_s", load) for each in (system, other))
        if weeks:
            return interval(geometric_mean(np.array(ours) / np.array(theirs)), self.strata)
        one, two = pooled_mean(ours, self.jobs), pooled_mean(theirs, self.jobs)
        return interval(lambda places: one(places) / two(places), self.strata, places)

    def typical_s(self, system: str, what: str) -> Interval:
        return interval(geometric_mean(self.of(system, what)), self.strata)

    def over(self, system: str, other: str, *, weeks: bool = False, load: float = LOAD) -> str:
        return "1" if system == other else self.ratio(system, other, load, weeks=weeks).text()

    def worse_weeks(self, load: float, places: Iterable[int]) -> list[float]:
        """Return our time over FIFO's, for weeks in which our policy is more than 1 % slower."""
        ours, theirs = (self.of(each, "mean_s", load) for each in (OURS, FIFO))
        return sorted(ours[place] / theirs[place] for place in places if ours[place] > 1.01 * theirs[place])

    def places_of(self, cluster: str) -> tuple[int, ...]:
        return tuple(place for place, each in enumerate(self.strata) if each == cluster)


def write(records: Records) -> str:
    cells, kept, windows = Cells(records), records.kept, records.kept.windows
    paper_spread, lucid_spread = (errors.spread_of(share) for share in (settings.PAPER_SHARE, settings.LUCID_SHARE))
    real = (fmean(window.gpus_at_work / window.gpus[at] for window in windows) for at in range(len(settings.LOADS)))
    return page(
        PAGE, settings=settings, kept=kept, bars=bar_rows(cells), **findings(cells), **with_model(),
        main=_system_rows(cells, simulate.MAIN), by_load=by_load_rows(cells), by_cluster=by_cluster_rows(cells),
        sweep=sweep_rows(cells), hidden=hidden_rows(cells), beside=_system_rows(cells, simulate.BESIDE),
        windows=windows_rows(windows), passing=cells.ratio(simulate.OURS_SKIP, simulate.FIFO_SKIP).text(),
        real_loads=", ".join(f"{load:.2f}" for load in real), shuffled_share=percent(kept.errors[SHUFFLED].under_100),
        paper_share=percent(settings.PAPER_SHARE), lucid_share=percent(settings.LUCID_SHARE),
        paper_spread=paper_spread, lucid_spread=lucid_spread, lucid_factor=math.exp(lucid_spread**2 / 2),
        paper_both=errors.spread_both_ways(settings.PAPER_SHARE),
        lucid_both=errors.spread_both_ways(settings.LUCID_SHARE),
        weeks_all=len(windows), clusters=len(set(cells.strata)), jobs=sum(window.jobs for window in windows),
        took_min=sum(result.took_s for result in kept.runs) / 60, peak_gb=kept.peak_bytes / 1e9,
    )  # fmt: skip


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def bar_rows(cells: Cells) -> Rows:
    for words, other in (
        ("shortest first with our error over FIFO", FIFO),
        ("our shortest first over Tiresias", TIRESIAS),
    ):
        yield [f"mean completion time, {words}", cells.ratio(OURS, other).text(3), "reported"]
    for load in settings.LOADS:
        jobs, weeks = (cells.ratio(OURS, TIRESIAS, load, weeks=each) for each in (False, True))
        verdict = "yes" if max(jobs.high, weeks.high) < 1 else "**not reproduced**"
        bar = f"{settings.PAPER_OVER_TIRESIAS:g} of Tiresias's time (§5.3), at load {load:g}"
        yield [bar, f"{jobs.text()}; by weeks {weeks.text()}", verdict]
    everywhere = {f"load {load:g}": cells.ratio(OURS, FIFO, load) for load in settings.LOADS}
    everywhere |= {
        f"`{cluster}`, load {load:g}": cells.ratio(OURS, FIFO, load, cells.places_of(cluster))
        for load in settings.LOADS for cluster in dict.fromkeys(cells.strata)
    }  # fmt: skip
    worse = "; ".join(f"{name}: {ratio.text()}" for name, ratio in everywhere.items() if ratio.low > 1.0)
    verdict = f"**no**: {worse}" if worse else f"yes, in all {len(everywhere)}"
    bar = "our policy is not worse than FIFO beyond its interval, at any load or in any virtual cluster"
    yield [bar, "", verdict]


def findings(cells: Cells) -> dict[str, str]:
    costs = []
    for name, system in (("ours", OURS), ("SchedMate's", PAPER), ("Lucid's", LUCID)):
        ratio = cells.ratio(system, SJF)
        value, low, high = (f"{100 * (each - 1):.0f}" for each in (ratio.value, ratio.low, ratio.high))
        costs.append(f"{name} {value} % ({low} to {high})")
    places = range(len(cells.strata))
    worse = sorted(ratio for load in settings.LOADS for ratio in cells.worse_weeks(load, places))
    count = f"{len(places)} weeks at {len(settings.LOADS)} loads"
    return {
        "costs": ", ".join(costs),
        "weeks": f"{len(worse)} of {count}, by {100 * (worse[-1] - 1):.0f} % at most" if worse else f"none of {count}",
        "ours_short": f"{cells.ratio(OURS, FIFO).value:.2f}",
        **{
            f"{name}{'_weeks' * weeks}_short": f"{cells.ratio(system, TIRESIAS, weeks=weeks).value:.2f}"
            for name, system in (("tiresias", OURS), ("sjf", SJF)) for weeks in (False, True)
        },
    }  # fmt: skip


def with_model() -> dict[str, Any]:
    kept = json.loads((RECORDS / "schedmate-language-model.json").read_text())
    lines, failures, parts = kept["lines"], kept["failures"], ("f1", "precision", "accuracy")
    tables = {name: scores for name, scores in failures.items() if isinstance(scores, dict)}
    strict = failures["without rows that know the test's texts"]
    found = {name: each["all"]["found"] for name, each in lines.items()}
    metrics = 100 * (found["rules and model"] - found["rules"])
    changes = (f"{part} {strict['rules and model'][part] - strict['rules'][part]:+.1f}" for part in parts)
    met = {"84 %": found["model alone"] >= 0.84, "67.7": strict["rules and model"]["f1"] >= settings.PAPER_F1}
    return {
        "model": f"`{kept['model']}` (SmolLM2-135M-Instruct, 4 bits)",
        "rules_found": percent(found["rules"]), "right_found": percent(found["right answers alone"]),
        "rules_f1": str(strict["rules"]["f1"]),
        "right_f1": str(strict["an opinion that is always right"]["f1"]),
        "model_changes": ", ".join((f"metrics found {metrics:+.1f}", *changes)).replace("f1", "F1"),
        "model_bars": ", ".join(f"bar of {bar} {'met' if is_met else 'missed'}" for bar, is_met in met.items()),
        "doubted": f"{100 * OPINION_BELOW:.0f} %", "questions": str(failures["questions"]),
        "lines_with_model": (
            [name, *(percent(found["all"][part]) for part in ("found", "right", "rates_found"))]
            for name, found in lines.items()
        ),
        "failures_with_model": (
            [table, name, *(str(found[part]) for part in parts)]
            for table, scores in tables.items() for name, found in scores.items() if isinstance(found, dict)
        ),
        "doubted_logs": " and ".join(str(scores["doubted"]) for scores in tables.values()),
        "believed": str(sum(scores["believed"] for scores in tables.values())),
    }  # fmt: skip


def _system_rows(cells: Cells, which: Sequence[str]) -> Rows:
    for system in which:
        preempted = sum(cells.of(system, "preempted")) / sum(cells.jobs)
        yield [
            NAMED[system], cells.mean_s(system).text(), cells.mean_s(system, "wait_s").text(),
            cells.typical_s(system, "p50_s").text(0), cells.typical_s(system, "p95_s").text(0),
            *(cells.over(system, other, weeks=weeks) for weeks in (False, True) for other in (FIFO, TIRESIAS)),
            f"{preempted:.2f}" if preempted else "",
        ]  # fmt: skip


def by_load_rows(cells: Cells) -> Rows:
    for system in simulate.MAIN:
        if system != FIFO:
            ratios = (cells.over(system, other, load=load) for other in (FIFO, TIRESIAS) for load in settings.LOADS)
            yield [NAMED[system], *ratios]


def by_cluster_rows(cells: Cells) -> Rows:
    for cluster in dict.fromkeys(cells.strata):
        places = cells.places_of(cluster)
        windows = [cells.kept.windows[place] for place in places]
        gpus = sorted(window.gpus[settings.LOADS.index(LOAD)] for window in windows)
        worse = cells.worse_weeks(LOAD, places)
        yield [
            f"`{cluster}`", str(len(places)), f"{sum(window.jobs for window in windows):,}", f"{gpus[0]} to {gpus[-1]}",
            cells.mean_s(FIFO, "wait_s", places=places).text(0),
            *(cells.ratio(OURS, other, LOAD, places).text() for other in (FIFO, TIRESIAS, SJF)),
            f"{len(worse)} ({', '.join(f'{ratio:.2f}' for ratio in worse)})" if worse else "0",
        ]  # fmt: skip


def _shares(cells: Cells, system: str) -> list[str]:
    return [percent(cells.kept.errors[system].under_100), percent(cells.kept.errors[system].within_two)]


def sweep_rows(cells: Cells) -> Rows:
    for system in (SJF, *simulate.SWEEP, SHUFFLED):
        name = "0" if system == SJF else system.removeprefix("spread ")
        ratios = (cells.over(system, other, weeks=weeks) for other in (FIFO, SJF) for weeks in (False, True))
        yield [name, *_shares(cells, system), *ratios]


def hidden_rows(cells: Cells) -> Rows:
    for system in (OURS, simulate.OUR_AVERAGE, PAPER, LUCID, SHUFFLED):
        yield [NAMED[system], *_shares(cells, system), cells.over(system, FIFO)]


def windows_rows(windows: Sequence[simulate.WindowFacts]) -> Rows:
    for window in windows:
        jobs = [f"{window.jobs:,}", f"{window.duration_s:,.0f}", f"{window.gpus_at_work:.1f}"]
        yield [f"`{window.cluster}`", str(window.week + 1), *jobs, *map(str, window.gpus)]


def draw(folder: Path, records: Records) -> None:
    cells = Cells(records)
    with plot_style() as figure_of:
        figure = figure_of(figsize=(7.6, 3.2), layout="constrained")
        all_jobs, by_weeks = figure.subplots(1, 2, sharey=True)
        _panel(all_jobs, lambda system: cells.ratio(system, FIFO), title="over all jobs")
        _panel(by_weeks, lambda system: cells.ratio(system, FIFO, weeks=True), title="each week alike")
        all_jobs.set_ylabel("mean completion time over FIFO's")
        by_weeks.legend(fontsize=7.5, loc="lower right")
        with draft_file(folder / FIGURE) as draft:
            figure.savefig(draft, dpi=110, metadata={"Software": None})


def _panel(axes: Axes, ratio: Callable[[str], Interval], *, title: str) -> None:
    def bars(found: list[Interval]) -> list[list[float]]:
        return [[one.value - one.low for one in found], [one.high - one.value for one in found]]

    axes.set_title(title)
    line = {SJF: 0.0, **dict(zip(simulate.SWEEP, settings.SPREADS, strict=True))}
    found = [ratio(system) for system in line]
    axes.errorbar([*line.values()], [one.value for one in found], yerr=bars(found), color=COLORS[0], marker="o",
                  markersize=3.5, elinewidth=0.9, label="lognormal error")  # fmt: skip
    paper, lucid = (errors.spread_of(share) for share in (settings.PAPER_SHARE, settings.LUCID_SHARE))
    spreads = {OURS: pstdev(errors.our_log_ratios()["estimates"]), PAPER: paper, LUCID: lucid}
    for place, (system, name) in enumerate({OURS: "ours", PAPER: "SchedMate's", LUCID: "Lucid's"}.items(), 1):
        one = ratio(system)
        axes.errorbar([spreads[system]], [one.value], yerr=bars([one]), color=COLORS[place], marker="s",
                      markersize=5.0, elinewidth=0.9, linestyle="none", label=name)  # fmt: skip
    for system, dashes in ((TIRESIAS, "--"), (SHUFFLED, ":")):
        axes.axhline(ratio(system).value, linestyle=dashes, color="#404040", linewidth=1.1, label=system)
    axes.axhline(1.0, color="#999999", linewidth=0.9)
    axes.set_xlabel("spread of log(prediction / truth)")
    axes.set_ylim(bottom=0.0)
