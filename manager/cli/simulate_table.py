"""What `stoker simulate` says of runs that are done: the table, what it shows, what was written, what to do next."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stoker.manager.study.comparison import SPEED, Column, PolicyRow, verdicts, worth_for
from stoker.manager.study.run_folder import SCENARIO, WrittenFiles
from stoker.manager.study.running import FinishedRun
from stoker.manager.study.scenario import Scenario, label
from stoker.manager.study.statistics import MeanEstimate
from stoker.units import show_seconds

_NARROW = 0.02
"""An interval that is no wider than this share of its mean is narrow enough for most questions."""


def table(rows: Sequence[PolicyRow], columns: Sequence[Column]) -> list[str]:
    """A line a policy, means with the half widths of their 95 % intervals. Columns without a number are left
    out, and those of zeros that nobody misses."""
    shown = [column for column in columns if _says_something(rows, column)]
    titles = {column.key: column.title for column in shown}
    scales = {column.key: column.scale for column in shown}
    if any(SPEED in row.estimates for row in rows):
        titles[SPEED] = f"speed (x {label(rows[0].policy)})"
    cells = [["policy", *titles.values()]]
    cells += [
        [label(row.policy), *(show(row.estimates[key], scale=scales.get(key, 1.0)) for key in titles)] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "   ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in cells
    ]


def show(found: MeanEstimate | None, *, scale: float = 1.0) -> str:
    """`578 ± 12`: as many digits as the mean deserves; a dash where there is no number."""
    if found is None:
        return "–"
    mean, half_width = found.mean * scale, (found.half_width or 0.0) * scale
    digits = next((digits for digits, least in enumerate((100.0, 10.0, 1.0)) if abs(mean) >= least), 3)
    if mean.is_integer() and not half_width:
        digits = 0
    return f"{mean:,.{digits}f}" + (f" ± {half_width:,.{digits}f}" if half_width else "")


def notes(runs: Sequence[FinishedRun], rows: Sequence[PolicyRow], scenario: Scenario) -> list[str]:
    """What the table does and does not show, in sentences."""
    out = verdicts(runs, rows, scenario=scenario)
    for row in rows:
        if row.cut_off:
            end = show_seconds(scenario.until_s)
            out.append(f"{label(row.policy)}: {row.cut_off} of {row.runs} runs were cut off after {end} (until)")
        if row.failed_calls:
            why: Counter[str] = Counter()
            for run in runs:
                if run.policy == row.policy:
                    why.update(run.outcome.failed)
            reason, _ = why.most_common(1)[0]
            failed = f"{row.failed_calls:,} calls failed"
            out.append(f"{label(row.policy)}: {failed}, most of them for this reason: {reason}")
    return out


def summary(runs: Sequence[FinishedRun], *, wall_s: float, jobs: int) -> str:
    """What it took."""
    events, seconds = sum(run.outcome.core_events for run in runs), sum(run.wall_s for run in runs)
    rate = f", {events / seconds:,.0f} core events/s each" if seconds else ""
    many = f"{jobs} processes" if jobs > 1 else "one process"
    return f"{count(len(runs), 'run')} in {show_seconds(wall_s)} on {many}{rate}"


def written(what: WrittenFiles) -> str:
    """A line on something that was written."""
    if not what.paths:
        return f"  {what.what:9} none: {what.about}"
    first = what.paths[0]
    if len(what.paths) == 1:
        return f"  {what.what:9} {first}   {what.about}"
    names = " ".join(os.path.basename(path) for path in what.paths)
    place = f"{os.path.dirname(first)}/"
    if len(what.paths) > 8:
        names = f"{os.path.basename(first)} … {os.path.basename(what.paths[-1])} ({len(what.paths)} files)"
    return f"  {what.what:9} {place}   {names}   {what.about}"


def next_steps(
    scenario: Scenario,
    runs: Sequence[FinishedRun],
    rows: Sequence[PolicyRow],
    *,
    asked: Sequence[str],
    folder: Path,
    known: Sequence[str],
) -> list[str]:
    """What to try now. `asked`: the command so far, without its policies when those are the scenario's; `known`: the
    policies that ship."""
    simulate = ["stoker", "simulate", *asked]
    steps: list[tuple[list[str], str]] = []
    others = [policy for policy in known if policy not in {row.policy for row in rows}]
    if len(rows) == 1 and others:
        more = f"beside another one; or {', '.join(others[1:])}" if others[1:] else "beside another one"
        this = [] if "--policy" in simulate else ["--policy", rows[0].policy]
        steps.append(([*simulate, *this, "--policy", others[0]], more))
    key = worth_for(scenario, runs).key
    found = [estimate for row in rows if (estimate := row.estimates.get(key)) is not None]
    if any(each.half_width is None or each.half_width > _NARROW * abs(each.mean) for each in found):
        seeds = str(4 * max(row.runs for row in rows))
        steps.append(([*simulate, "--seeds", seeds], "narrower intervals"))
    source = scenario.world.sources[0]
    half = f"sources.{source.name}.max_blocks={max(1, source.max_blocks // 2)}"
    steps.append(([*simulate, "--set", half], "another world"))
    steps.append((["stoker", "simulate", str(folder / SCENARIO)], "exactly this again"))
    commands = [shlex.join(words) for words, _ in steps]
    wide = max(map(len, commands))
    return [
        f"{'next:' if command is commands[0] else '':6}{command:{wide}}   {why}"
        for command, (_, why) in zip(commands, steps, strict=True)
    ]


def count(number: int, noun: str) -> str:
    """`1 run`, `10 runs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _says_something(rows: Sequence[PolicyRow], column: Column) -> bool:
    found = [estimate for row in rows if (estimate := row.estimates[column.key]) is not None]
    return any(each.mean or each.half_width for each in found) if column.may_lack else bool(found)
