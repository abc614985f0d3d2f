"""The page's plots: violations and cost, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.prompt_tuner import paper, scenarios
from benchmarks.papers.prompt_tuner.record import Evaluation, Record, evaluations
from benchmarks.papers.prompt_tuner.scenarios import MEDIUM, NOBODY, Group, Reading, System, at, of_bank
from stoker.manager.study.plots import COLORS, style
from stoker.manager.study.statistics import estimate
from stoker.whole_files import draft_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DOTS_PER_INCH = 110
_Place = tuple[str, Group]


def draw(folder: Path, record: Record) -> list[Path]:
    paths = [folder / f"prompttuner-figure-{number}.png" for number in (7, 8)]
    of = evaluations(record)[0]
    with style() as figure_of:
        figures = [figure_of(figsize=(7.6, 4.8), layout="constrained") for _ in paths]
        _figure_7(figures[0].subplots(2, 2, sharey="row"), of, record)
        _figure_8(figures[1].subplots(2, 3, sharey="row"), of)
        for path, figure in zip(paths, figures, strict=True):
            with draft_of(path) as draft:
                figure.savefig(draft, dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return paths


def _figure_7(axes: Sequence[Sequence[Axes]], of: Evaluation, record: Record) -> None:
    loads: list[_Place] = [(load, at(load, 1.0)) for load in paper.MAIN_LOADS]
    levels: list[_Place] = [(f"S = {emergence:g}", at("medium", emergence)) for emergence in paper.EMERGENCES]
    both = (Reading.HOLD, Reading.RESIZES)
    systems = {"ours": NOBODY, **{reading.value: record.chosen[reading] for reading in both}}
    for column, places in enumerate((loads, levels)):
        _pair((axes[0][column], axes[1][column]), of, places, systems)
    axes[0][0].set_title("by load, S = 1; nobody learns")
    axes[0][1].set_title("by S, medium load")
    axes[0][0].legend(fontsize=6.5)


def _figure_8(axes: Sequence[Sequence[Axes]], of: Evaluation) -> None:
    levels: list[_Place] = [(f"{emergence:g}", at("medium", emergence)) for emergence in paper.EMERGENCES]
    _pair((axes[0][0], axes[1][0]), of, levels, dict(scenarios.FIGURE_8_AB))
    axes[0][0].set_title("reuse, by S")
    axes[0][0].legend(fontsize=6.5)
    windows = {f"{seconds:g}": scenarios.of_window(seconds, usual_s=paper.WINDOW_S) for seconds in paper.WINDOWS_S}
    _line((axes[0][1], axes[1][1]), of, [(name, MEDIUM, system) for name, system in windows.items()])
    axes[0][1].set_title("window, s")
    banks = [(f"{size:,}", of_bank(size), NOBODY) for size in paper.BANK_SIZES]
    _line((axes[0][2], axes[1][2]), of, banks)
    axes[0][2].set_title("candidates in the bank")


def _pair(axes: tuple[Axes, Axes], of: Evaluation, places: Sequence[_Place], systems: dict[str, System]) -> None:
    width = 0.8 / len(systems)
    for which, (label, system) in enumerate(systems.items()):
        at_x = [place + (which - (len(systems) - 1) / 2) * width for place in range(len(places))]
        for values_of, each in zip((of.violations, of.costs), axes, strict=True):
            found = [estimate(values_of(group, system)) for _, group in places]
            spread = [one.half_width or 0.0 for one in found]
            means = [one.mean for one in found]
            each.bar(
                at_x, means, width * 0.92, yerr=spread, color=COLORS[which], label=label, error_kw={"linewidth": 1.0}
            )
    _named(axes, [name for name, _ in places])


def _line(axes: tuple[Axes, Axes], of: Evaluation, points: Sequence[tuple[str, Group, System]]) -> None:
    for values_of, each in zip((of.violations, of.costs), axes, strict=True):
        found = [estimate(values_of(group, system)) for _, group, system in points]
        spread = [one.half_width or 0.0 for one in found]
        each.errorbar(
            range(len(points)), [one.mean for one in found], yerr=spread, color=COLORS[0], marker="o", markersize=3.5
        )
        each.set_ylim(bottom=0.0)
    _named(axes, [name for name, _, _ in points])


def _named(axes: tuple[Axes, Axes], names: Sequence[str]) -> None:
    for each, label in zip(axes, ("violations, %", "cost, $"), strict=True):
        each.set_xticks(range(len(names)), names)
        if each.get_subplotspec() is None or each.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            each.set_ylabel(label)
