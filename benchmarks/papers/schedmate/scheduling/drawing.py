"""The page's figure: mean completion time over FIFO's by how wrong predictions are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.schedmate.scheduling import errors, settings, simulate
from benchmarks.papers.schedmate.scheduling.intervals import Interval
from benchmarks.papers.schedmate.scheduling.records import Records
from benchmarks.papers.schedmate.scheduling.report import Cells
from stoker.manager.study.plots import COLORS, style
from stoker.whole_files import draft_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
