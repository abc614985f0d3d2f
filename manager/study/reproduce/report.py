"""`docs/reproduction/context-paper.md`: paper and prediction side by side, and what cannot be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from stoker.contexts.recipe import Awareness
from stoker.manager.study.reproduce import paper
from stoker.manager.study.reproduce.fit import GOOD
from stoker.manager.study.reproduce.parameters import BOUNDS, Parameters
from stoker.manager.study.reproduce.predict import Prediction, spread
from stoker.units import show_bytes


class Found(msgspec.Struct, frozen=True):
    """What the reproduction came to. `simulated`: the six static runs with the first of the `fits`."""

    fits: tuple[Parameters, ...]
    simulated: tuple[tuple[paper.Run, float], ...]
    predictions: tuple[tuple[Prediction, ...], ...]


def write(found: Found) -> str:
    """The page, in Markdown."""
    ranges = spread([list(each) for each in found.predictions])
    parts = [_HEAD, _unknowns(found.fits), _static(found), _predicted(found, ranges), _UNKNOWABLE]
    return "\n".join(parts)


_HEAD = f"""# Pervasive Context Management §4, in the simulator

`make reproduce` writes this page and its figures anew (some minutes on two cores). The manager, its default
policies and the pilots' books are those of a live session; models of what carries out their commands are in
`manager/sim`. Parameters were fitted on Figures 6 and 7 alone, under bounds of what is physically possible, written
to [context-paper-parameters.json](context-paper-parameters.json), and nothing was changed before Figures 8 and 9
were predicted. All sets whose errors are under {GOOD:.0%} count alike: ranges are over all of them.
"""


def _unknowns(fits: Sequence[Parameters]) -> str:
    lines = [
        f"## The unknowns ({len(fits)} sets of parameters, all as good)",
        "",
        "| parameter | possible | found | why these bounds |",
        "|---|---|---|---|",
    ]
    for name, bound in BOUNDS.items():
        values = [getattr(each, name) for each in fits]
        shown = [_show(name, value) for value in (bound.low, bound.high, median(values), min(values), max(values))]
        lines.append(f"| {name} | {shown[0]} to {shown[1]} | {shown[2]} ({shown[3]} to {shown[4]}) | {bound.why} |")
    return "\n".join([*lines, ""])


def _show(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return f"{show_bytes(value)}/s"
    return f"{value:.0f}" if name == "warm_items" else f"{value:.3g} s"


def _static(found: Found) -> str:
    lines = [
        "## Figures 6 and 7: fitted",
        "",
        "150,000 inferences on ten A10 and ten TITAN X (Pascal); the first parameter set, in the simulator.",
        "",
        "| figure | context | inferences a call | paper, s | simulated, s | error |",
        "|---|---|---|---|---|---|",
    ]
    names = {Awareness.NONE: "agnostic", Awareness.DISK: "partial (on disk)", Awareness.FULL: "full"}
    for run, seconds in found.simulated:
        error = seconds / run.seconds - 1.0
        times = f"{run.seconds:,.0f} | {seconds:,.0f} | {error:+.1%}"
        lines.append(f"| {run.figure} | {names[run.awareness]} | {run.batch:,} | {times} |")
    return "\n".join([*lines, ""])


def _predicted(found: Found, ranges: Mapping[str, tuple[float, float]]) -> str:
    rows = (
        ("8 disk", "8, partial: inferences done", f"{paper.FIGURE_8[Awareness.DISK]:,}"),
        ("8 full", "8, full: inferences done", f"{paper.FIGURE_8[Awareness.FULL]:,}"),
        ("9a", "9a, 4 to 20 GPUs: seconds", f"about {paper.FIGURE_9A_S:,.0f}"),
        ("9b", "9b, up to 186 GPUs: seconds", f"{paper.FIGURE_9B_S:,.0f}"),
    )
    values = {"8 disk": 46_000.0, "8 full": 62_900.0, "9a": paper.FIGURE_9A_S, "9b": paper.FIGURE_9B_S}
    lines = ["## Figures 8 and 9: predicted", "", "| figure | paper | predicted | |", "|---|---|---|---|"]
    for key, what, said in rows:
        low, high = ranges[key]
        inside = "inside" if low <= values[key] <= high else "**outside**"
        lines.append(f"| {what} | {said} | {low:,.0f} to {high:,.0f} | {inside} |")
    gain = [
        each_full.value / each_disk.value
        for each in found.predictions
        for each_disk in each
        if each_disk.figure == "8" and each_disk.variant == Awareness.DISK.value
        for each_full in each
        if each_full.figure == "8" and each_full.variant.startswith(Awareness.FULL.value)
    ]
    off = [one.off_line for each in found.predictions for one in each if one.figure.startswith("9")]
    lines += [
        "",
        f"Full against partial under preemption: {min(gain):.2f} to {max(gain):.2f} (paper: 1.37). Completed inferences"
        f" are proportional to the integral of the capacity within {max(off):.1%} of all (median {median(off):.1%});"
        " what is off is the loads of GPUs that have just come.",
        "",
    ]
    return "\n".join(lines)


_UNKNOWABLE = """## What cannot be known from the text

- *How long an inference takes on each kind of GPU.* Times of whole runs on a half-and-half pool give one
  combination of the two. Which kind does more of the work decides Figure 8, where one kind goes first.
- *When the three GPUs of Figure 8 dropped out, and of which kind.* A10s at 60, 300 or 600 s were tried.
- *How the pools of Figure 9 grew.* Straight lines of several lengths were tried; the range is over them.
- *How fast the other six kinds of Table 1 are.* They were given speeds by their peak rates, along a power law
  through the two kinds that were fitted: good enough for a mix, wrong for each.
- *Whether the first inferences of a process are slower.* Without that, A10s would have to load three times as
  slowly as cards five years older; with it, loads are alike. Both explain Figures 6 and 7.
"""
