"""Reduces curves of runs to few points, and plots them as PNG and SVG. Equal runs produce equal files.

Each policy has one line: the median over its seeds, in a band from minimum to maximum.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.errors import StokerError
from stoker.manager.study.measures import Measures, StepCurve
from stoker.manager.study.statistics import quantile
from stoker.whole_files import draft_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_POINTS = 1_000
SHARES = tuple(number / 200 for number in range(201))  # Shares for the quantiles of wait and turnaround times


class Curves(msgspec.Struct, frozen=True):
    """Curves of one run's `Measures`, and quantiles of waits and turnarounds at `SHARES` (empty without calls)."""

    ended_at: float
    completed: StepCurve
    devices: StepCurve
    queue: StepCurve
    waits_s: tuple[float, ...]
    turnarounds_s: tuple[float, ...]


def make_run_curves(measures: Measures) -> Curves:
    completed, devices, queue = map(thin_curve, (measures.completed, measures.devices, measures.queue))
    waits_s, turnarounds_s = _quantiles(measures.waits_s), _quantiles(measures.turnarounds_s)
    return Curves(measures.ended_at, completed, devices, queue, waits_s, turnarounds_s)


def thin_curve(steps: StepCurve, *, points: int = MOST_POINTS) -> StepCurve:
    """Return the curve with at most `points` steps, at equal time intervals."""
    if len(steps.at_s) <= points:
        return steps
    first, last = steps.at_s[0], steps.at_s[-1]
    each_s = (last - first) / (points - 1)
    moments = [first + number * each_s for number in range(points - 1)]
    return StepCurve((at_s, steps.value_at(at_s)) for at_s in [*moments, last])


def _quantiles(values: array[float]) -> tuple[float, ...]:
    return tuple(quantile(values, share) for share in SHARES) if values else ()


Runs = Mapping[str, Sequence[Curves]]  # Each policy's runs, one per seed, in the order of the colours
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Okabe and Ito's colours, which people with any colour vision can distinguish."""
_DASHES = ("-", "--", ":", "-.")
_MOMENTS = 800
_PNG_DOTS_PER_INCH = 160
_STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.titlesize": 10.0, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6, "axes.edgecolor": "#808080", "axes.linewidth": 0.8, "xtick.color": "#404040",
    "ytick.color": "#404040", "legend.frameon": False, "lines.linewidth": 1.4, "svg.hashsalt": "stoker",
}  # fmt: skip
_UNITS = ((2 * 86_400.0, 86_400.0, "days"), (3 * 3600.0, 3600.0, "h"), (15 * 60.0, 60.0, "min"), (0.0, 1.0, "s"))


def write_plots(folder: Path, runs: Runs, *, title: str) -> list[Path]:
    """Draw `completed`, `devices`, `queue` and `times`, each as PNG and SVG. Raises StokerError without matplotlib."""
    if not any(runs.values()):
        raise ValueError("there are no runs to draw")

    def until_end(run: Curves, at_s: float, name: str) -> float:
        steps: StepCurve = getattr(run, name)
        return steps.value_at(at_s) if name == "completed" or at_s <= run.ended_at else 0.0

    words = {"completed": "items done", "devices": "devices", "queue": "calls that wait"}
    drawn: dict[str, tuple[int, Callable[..., None]]] = {
        name: (1, partial(_plot_over_time, value=partial(until_end, name=name), words=said))
        for name, said in words.items()
    }
    drawn["times"] = 2, _plot_call_times
    paths: list[Path] = []
    with plot_style() as figure_of:
        for name, (panels, draw) in drawn.items():
            figure = figure_of(figsize=(6.4 if panels == 1 else 7.6, 3.6), layout="constrained")
            axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
            draw(*axes, runs)
            axes[0].set_title(title)
            handles, labels = axes[0].get_legend_handles_labels()
            if len(labels) > 1:
                figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
            for path in (folder / f"{name}.png", folder / f"{name}.svg"):
                no_facts = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
                with draft_file(path) as draft:
                    figure.savefig(draft, dpi=_PNG_DOTS_PER_INCH, metadata=no_facts)
                paths.append(path)
    return paths


@contextmanager
def plot_style() -> Iterator[Callable[..., Any]]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StokerError(
            f'plots need matplotlib ({error}); python -m pip install "stoker[study]" installs matplotlib, and '
            "[outputs] plots = false omits the plots"
        ) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield Figure


def _plot_over_time(axes: Axes, runs: Runs, *, value: Callable[[Curves, float], float], words: str) -> None:
    end_s = max(run.ended_at for of_policy in runs.values() for run in of_policy) or 1.0
    moments = [end_s * number / _MOMENTS for number in range(_MOMENTS + 1)]
    unit_s, unit = _choose_time_unit(end_s)
    shown = [moment / unit_s for moment in moments]
    for label, of_policy, look in _styled_runs(runs):
        columns = [[value(run, moment) for run in of_policy] for moment in moments]
        if len(of_policy) > 1:
            least, most = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(shown, least, most, step="post", color=look["color"], alpha=0.18, linewidth=0.0)
        axes.step(shown, [median(column) for column in columns], where="post", label=label, **look)
    axes.set_ylabel(words)
    axes.set_xlim(0.0, end_s / unit_s)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(f"time ({unit})")
    axes.locator_params(axis="y", integer=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _plot_call_times(waits: Axes, turnarounds: Axes, runs: Runs) -> None:
    _plot_distribution(waits, runs, lambda run: run.waits_s, words="from arrival to start")
    _plot_distribution(turnarounds, runs, lambda run: run.turnarounds_s, words="from arrival to end")
    waits.set_ylabel("share of calls")


def _plot_distribution(axes: Axes, runs: Runs, times_of: Callable[[Curves], Sequence[float]], *, words: str) -> None:
    lines = []
    for label, of_policy, look in _styled_runs(runs):
        known = [times_of(run) for run in of_policy if times_of(run)]
        if known:
            lines.append((label, [fmean(times) for times in zip(*known, strict=True)], look))
    unit_s, unit = _choose_time_unit(max((times[-1] for _, times, _ in lines), default=1.0))
    for label, times, look in lines:
        axes.plot([time / unit_s for time in times], SHARES, label=label, **look)
    axes.set_xlim(left=0.0)
    axes.set_ylim(0.0, 1.0)
    axes.set_xlabel(f"{words} ({unit})")


def _styled_runs(runs: Runs) -> Iterator[tuple[str, Sequence[Curves], dict[str, Any]]]:
    for number, (policy, of_policy) in enumerate(runs.items()):
        if of_policy:
            dashes = _DASHES[number // len(COLORS) % len(_DASHES)]
            yield policy, of_policy, {"color": COLORS[number % len(COLORS)], "linestyle": dashes}


def _choose_time_unit(longest_s: float) -> tuple[float, str]:
    return next((unit_s, name) for least_s, unit_s, name in _UNITS if longest_s >= least_s)
