"""Measure the quality of prompts from the bank as iterations to accuracy (ITA), on real tasks with a real model.

PromptTuner §6.3 (Figure 9) compares three prompts. The *score candidate* has the lowest score. The *ideal* prompt has
the best ITA of the short list, which contains the prompts with the lowest scores. The model writes the *induced*
prompt. All rules were fixed before the first comparison, except the maximum of iterations: 15 at first, 60 after seven
tasks. `prompt_quality_side.Settings` contains the numbers.

- *Target* (§6.1): the lowest loss in 15 iterations, averaged over 3 random prompts (20 in the paper). The short list is
  tuned in order of scores; a prompt slower than an earlier prompt is stopped.
- *ITA*: the first evaluation that reaches the target, or the maximum. A second line of results interpolates between
  evaluations.
- *Ratios* of a task: ITA of the best of the short list, the median random prompt and the induced prompt, divided by ITA
  of the score candidate. A bar applies to the median over tasks, with a 95 % bootstrap interval.
- *Spread* (Figure 2c): 20 random prompts of `claims`, each tuned for the maximum.

A stopped run resumes from the curves in `$STOKER_HOME/prompt-quality-benchmark`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from benchmarks.harness import MODEL, Skipped, need, run_side
from benchmarks.tables import Bar, Line, Table
from benchmarks.tuning.prompt_tasks import need_prompts
from stoker.chance import Stream

DRAWS = 10_000
SPREAD_TASK, SPREAD = "claims", 20
"""Task and number of prompts for Figure 2c."""
SPREAD_SAID = (1.7, 4.5)
"""Median and maximum iterations in the paper, each divided by the minimum (§2.2)."""
SPREAD_LINE = "{} random prompts of {} to their own target (Figure 2c)"
KINDS = (
    ("the best of the short list / the one chosen by score", "best", 0.9),
    ("a random prompt / the one chosen by score", "randoms", 1.3),
    ("an induced prompt / the one chosen by score", "induced", None),
)


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    from benchmarks.tuning.prompt_quality_side import run

    need(*MODEL[: 2 if quick else None], "peft")
    if not quick:
        need_prompts()
    found = run_side(run, quick=quick, timeout_s=12 * 3600)
    say(found["machine"])
    return table_of(found)


def table_of(found: dict[str, Any]) -> Table:
    tasks: dict[str, Any] = found["tasks"]
    settings = found["settings"]
    if not tasks:
        raise Skipped("no task is whole; the side has to go on")
    lines, notes = [], []
    for suffix, how in (("", ""), ("_between", ", between evaluations")):
        for what, name, least in KINDS:
            those = [one for one in tasks.values() if one[name + suffix]]
            if not those:
                continue
            some = [one[name + suffix] for one in those]
            theirs = [statistics.median(each if isinstance(each, list) else [each]) for each in some]
            ours = [float(one["by_score" + suffix]) for one in those]
            ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
            bar = Bar(at_least=least, repeats=10) if least is not None and not suffix else None
            cells = {"its ITA": theirs, "ITA of the chosen": ours, "ratio": ratios}
            lines.append(Line(what=what + how, cells=cells, bar=bar, digits=1))
            low, high = interval(ratios)
            notes.append(f"{what}{how}: {statistics.median(ratios):.2f}, 95 % interval {low:.2f} to {high:.2f}")
    for task, one in tasks.items():
        of = {name: ", ".join(map(str, one[name])) or "none yet" for name in ("listed", "randoms", "induced")}
        notes.append(
            f"{task}: target {one['reach']:.3f}; chosen {one['by_score']}{'' if one['reached'] else ' (not reached)'},"
            f" short list {of['listed']}, random {of['randoms']}, induced {of['induced']}; {one['scores']} scores"
        )
    for task, one in found.get("spread", {}).items():
        for name, how in (("iterations", ""), ("between", ", between evaluations")):
            lines.append(
                Line(what=SPREAD_LINE.format(len(one[name]), task) + how, cells={"its ITA": one[name]}, digits=1)
            )
        notes.append(_spread(task, one))
    notes.append(f"at most {settings['iterations']} iterations, {found['spent_s']:,.0f} s of processor time in all")
    return Table(lines=lines, notes=notes)


def _spread(task: str, one: dict[str, Any]) -> str:
    low, high = SPREAD_SAID
    return (
        f"{task}, {len(one['between'])} random prompts to {one['reach']:.3f}: {spread_text(one['iterations'])}; between"
        f" evaluations {spread_text(one['between'])} (Figure 2c: {low} to {high}); {one['never']} never reach it and"
        " count as the most"
    )


def spread_text(iterations: Sequence[float]) -> str:
    least, median, most = min(iterations), statistics.median(iterations), max(iterations)
    times = f"median and most are {median / least:.1f} and {most / least:.1f} times the least"
    return f"{least:.3g} to {most:.3g} iterations, median {median:.3g}: {times}"


def interval(numbers: Sequence[float]) -> tuple[float, float]:
    medians = sorted(statistics.median([numbers[place] for place in places]) for places in _resamples(len(numbers)))
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]


@lru_cache(maxsize=4)
def _resamples(count: int) -> list[list[int]]:
    chance = Stream(0, "bootstrap")
    return [[int(count * chance.uniform(draw * count + place)) for place in range(count)] for draw in range(DRAWS)]
