"""Draw the figures of the page: numbers of the paper and simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.papers.pervasive import fit, paper
from benchmarks.papers.pervasive.fit import Fit
from benchmarks.papers.pervasive.predict import BATCHES, LOOK_S, Prediction
from stoker.contexts.recipe import Awareness
from stoker.manager.study.plots import COLORS, plot_style
from stoker.whole_files import draft_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Predicted = Sequence[Sequence[Prediction]]
_DOTS_PER_INCH = 95
NAMES = {Awareness.NONE: "agnostic", Awareness.DISK: "partial", Awareness.FULL: "full"}
_COLOR = {Awareness.DISK: COLORS[1], Awareness.FULL: COLORS[0]}


def draw_figures(
    folder: Path, fits: Sequence[Fit], simulated: Sequence[tuple[paper.Run, float]], predicted: Predicted
) -> None:
    paths = [folder / f"context-paper-figures-{which}.png" for which in ("6-7", "8", "9")]
    with plot_style() as figure_of:
        figures = [figure_of(figsize=(7.2, height), layout="constrained") for height in (3.2, 3.2, 6.6)]
        _draw_static_runs(figures[0].subplots(), fits, simulated)
        *done, gpus = figures[1].subplots(1, len(BATCHES) + 1)
        _draw_figure_8(done, gpus, predicted)
        columns = figures[2].subplots(len(BATCHES) + 1, 2, sharex="col").T
        ends = ("9a", paper.FIGURE_9A_S), ("9b", paper.FIGURE_9B_S)
        for (*done, gpus), (number, end_s) in zip(columns, ends, strict=True):
            _draw_figure_9(done, gpus, number, end_s, predicted)
        for path, figure in zip(paths, figures, strict=True):
            with draft_file(path) as draft:
                figure.savefig(draft, dpi=_DOTS_PER_INCH, metadata={"Software": None})


def _draw_static_runs(axes: Axes, fits: Sequence[Fit], simulated: Sequence[tuple[paper.Run, float]]) -> None:
    places = range(len(simulated))
    said = [run.seconds for run, _ in simulated]
    axes.bar([place - 0.2 for place in places], said, 0.38, color="#a0a0a0", label="paper")
    axes.bar([place + 0.2 for place in places], [seconds for _, seconds in simulated], 0.38, label="simulated")
    for place, (run, _) in enumerate(simulated):
        values = [fit.static_run_s(each.parameters, run.awareness, run.batch) for each in fits]
        axes.vlines(place + 0.2, min(values), max(values), color="black", linewidth=1.2)
        if run.most:
            axes.vlines(place - 0.2, run.seconds, run.most, color="black", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(list(places), [f"{NAMES[run.awareness]}\ncalls of {run.batch:,}" for run, _ in simulated])
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_title("Figures 6 and 7 (lines: all parameter sets; the paper's limits)")
    axes.legend()


def _draw_figure_8(done: Sequence[Axes], gpus: Axes, predicted: Predicted) -> None:
    for awareness in (Awareness.FULL, Awareness.DISK):
        runs = [[one for one in each if one.is_prediction_of("8", awareness)] for each in predicted]
        color = _COLOR[awareness]
        for axes, batch in zip(done, BATCHES, strict=True):
            _draw_over_time(axes, _predictions_of_batch(batch, runs), 0, color=color, label=NAMES[awareness])
            axes.axhline(paper.FIGURE_8[awareness], color=color, linestyle=":", label=f"paper, {NAMES[awareness]}")
        _draw_over_time(gpus, runs, 1, color=color, label=NAMES[awareness])
    for axes, batch in zip(done, BATCHES, strict=True):
        axes.set_title(f"Figure 8, calls of {batch:,}")
    done[0].set_ylabel("inferences completed")
    gpus.set_title("GPUs that are there")
    done[0].legend(fontsize=6.5)


def _draw_figure_9(done: Sequence[Axes], gpus: Axes, number: str, end_s: float, predicted: Predicted) -> None:
    runs = [[one for one in each if one.is_prediction_of(number, Awareness.FULL)] for each in predicted]
    for axes, batch in zip(done, BATCHES, strict=True):
        _draw_over_time(axes, _predictions_of_batch(batch, runs), 0, color=COLORS[0], label="")
        axes.set_title(f"Figure {number}: completed, calls of {batch:,}")
        axes.set_xlabel("")
    _draw_over_time(gpus, runs, 1, color=COLORS[0], label="")
    gpus.set_title("GPUs that are there")
    for axes in (*done, gpus):
        axes.axvline(end_s, color="black", linestyle=":", label="done, paper")
    done[0].legend(fontsize=7.5)


def _predictions_of_batch(batch: int, runs: Predicted) -> list[list[Prediction]]:
    return [[one for one in each if one.batch == batch] for each in runs]


def _draw_over_time(axes: Axes, runs: Predicted, which: int, *, color: str, label: str) -> None:
    every = [one.looks for each in runs for one in each]
    rows = range(max(map(len, every)))
    seconds = [row * LOOK_S for row in rows]
    # Completed tasks count after the end of a run, but GPUs do not.
    columns = [
        [looks[min(row, len(looks) - 1)][which] for looks in every if not which or row < len(looks)] for row in rows
    ]
    axes.fill_between(seconds, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.18, linewidth=0.0)
    look: dict[str, Any] = {"label": label} if label else {}
    median = sorted(runs[0], key=lambda one: one.value)[(len(runs[0]) - 1) // 2]
    middle = [numbers[which] for numbers in median.looks]
    axes.plot(seconds[: len(middle)], middle, color=color, **look)
    axes.set_xlim(0.0, seconds[-1])
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("seconds")
    axes.locator_params(axis="x", nbins=5)
    axes.locator_params(axis="y", integer=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
