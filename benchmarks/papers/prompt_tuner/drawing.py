"""The page's plot: late jobs and cost, with 95 % intervals over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.prompt_tuner.record import Record
from benchmarks.papers.prompt_tuner.report import GROUPS, Page
from benchmarks.papers.prompt_tuner.scenarios import ELASTIC_FLOW, LITERAL, OURS
from stoker.manager.study.plots import COLORS, style
from stoker.manager.study.statistics import MeanEstimate, estimate
from stoker.whole_files import draft_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT = "prompttuner-figure.png"
_DOTS_PER_INCH = 110
_WIDTH = 0.27


def draw(folder: Path, record: Record) -> Path:
    page, path = Page(record), folder / PLOT
    systems = {"ours": OURS, "INFless, literal": LITERAL, "ElasticFlow": ELASTIC_FLOW}
    late = {
        name: [estimate(page.at(group).late(group, system)) for group in GROUPS] for name, system in systems.items()
    }
    cost = {name: [page.at(group).cost(group, system) for group in GROUPS] for name, system in systems.items()}
    with style() as figure_of:
        figure = figure_of(figsize=(7.6, 5.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        _bars(above, late, "late jobs, %")
        _bars(below, cost, "cost, $")
        above.legend(fontsize=6.5)
        with draft_of(path) as draft:
            figure.savefig(draft, dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return path


def _bars(axes: Axes, found: dict[str, list[MeanEstimate]], what: str) -> None:
    for which, (label, several) in enumerate(found.items()):
        places = [place + (which - 1) * _WIDTH for place in range(len(several))]
        axes.bar(
            places, [one.mean for one in several], _WIDTH * 0.92, yerr=[one.half_width or 0.0 for one in several],
            color=COLORS[which], label=label, error_kw={"linewidth": 1.0},
        )  # fmt: skip
    axes.set_xticks(range(len(GROUPS)), [group.name for group in GROUPS])
    axes.set_ylabel(what)
