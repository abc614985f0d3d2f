"""`python -m benchmarks.quotes`: update the figures in README and docs that are copied from records.

Each quote is a whole line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import quoted_records
from benchmarks.harness import ROOT
from benchmarks.papers.pervasive import report as context
from benchmarks.papers.pervasive.__main__ import RECORD as CONTEXT_RECORD
from benchmarks.papers.pervasive.__main__ import read as read_context
from benchmarks.papers.prompt_tuner import paper, report_bars, scenarios
from benchmarks.papers.prompt_tuner.grid import read_grid
from benchmarks.papers.prompt_tuner.record import Evaluation, Page, Record, evaluations, over, read, show
from benchmarks.papers.prompt_tuner.report import RECORD as TUNER_RECORD
from benchmarks.papers.prompt_tuner.report_sets import again_anchored
from benchmarks.papers.prompt_tuner.scenarios import INFLESS, MEDIUM, NOBODY, Condition, Reading, System
from benchmarks.tables import row
from stoker.manager.study.statistics import estimate

FOLDER = ROOT / "docs" / "reproduction"
_TUNER = "`prompt-tuner` has"


class Quote(NamedTuple):
    path: Path
    begins: str
    line: str


def quotes() -> list[Quote]:
    record = read(FOLDER / TUNER_RECORD)
    performance = ROOT / "docs" / "performance.md"
    found = [_quote(performance, _TUNER, _headline(record))]
    found += [_quote(performance, begins, line) for begins, line in _schedulers(record)]
    condition = (
        f"In the simulator, medium load on 32 GPUs, S = 1, the most central of {len(record.sets)} sets of"
        f" assumptions, {len(record.seeds)} seeds, 95 % intervals; no scheduler learns from earlier jobs, as in the"
        " paper:"
    )
    found.append(_quote(performance, "In the simulator, medium load", condition))
    found.append(_quote(performance, "Of the 16 bars against these baselines", _judged(record)))
    found.append(_quote(performance, "Of the context paper", context.quote(read_context(FOLDER / CONTEXT_RECORD))))
    found += [_quote(ROOT / "README.md", begins, line) for begins, line in quoted_records.front()]
    lines = (
        *quoted_records.peers(), *quoted_records.awareness(), *quoted_records.lost(), quoted_records.whole_run(),
        quoted_records.preempted(), quoted_records.fidelity(), quoted_records.gpu(), quoted_records.tuning(),
    )  # fmt: skip
    found += [_quote(performance, begins, line) for begins, line in lines]
    benchmarks, bank = ROOT / "benchmarks" / "FINDINGS.md", ROOT / "docs" / "prompt-bank.md"
    found += [
        _quote(path, begins, line)
        for path, (begins, line) in zip((benchmarks, bank), quoted_records.quality(), strict=True)
    ]
    spread = quoted_records.prompt_spread()
    found.append(_quote(benchmarks, "20 random prompts of `claims`", f"{spread} (Figure 2c; no bar)."))
    return found


def _quote(path: Path, begins: str, line: str) -> Quote:
    if not line.startswith(begins):
        raise ValueError(f"a quote of {path.name} begins otherwise than it is found: {line!r}")
    return Quote(path, begins, line)


def _headline(record: Record) -> str:
    every, theirs = evaluations(record), record.chosen[Reading.HOLD]
    one = every[0]
    late, behind = (show(estimate(one.violations(MEDIUM, system))) for system in (NOBODY, theirs))
    fewer, between = over(every, lambda each: each.more_violations(MEDIUM, theirs, NOBODY)).shown()
    times, dearer = over(every, lambda each: each.times_the_cost(MEDIUM, theirs, NOBODY)).shown(digits=2)
    other = show(one.more_violations(MEDIUM, record.chosen[Reading.AT_ONCE], NOBODY))
    said = "{:g} to {:g}".format(*paper.FEWER_POINTS[INFLESS])
    off = max(abs(part) for _, part in again_anchored(Page(record), one))
    asked = {bar.what: bar for bar in report_bars.against_baselines(every, record.chosen, Condition.NOBODY)}
    points, dollars = (
        f"our bar is {bar.wanted:g}, {'met' if bar.verdict == 'yes' else 'missed'}"
        for what, bar in asked.items()
        if Reading.HOLD.value in what and "medium" in what
    )
    text = f"""{_TUNER} {late} % of the jobs late, our version of INFless {behind} %: {fewer} points fewer ({between}
        over {len(every)} sets of assumptions; {other} by the other reading of INFless; {points}; the paper has {said}).
        INFless costs {times} times as much ({dearer}; {dollars}). With these assumptions, two of the paper's numbers
        that they are chosen to match are off by up to {off:.0%}."""
    early = "A first look. " if len(record.searched.stages) < len(read_grid().stages) else ""
    return " ".join((text + " " + early).split())


def _schedulers(record: Record) -> list[tuple[str, str]]:
    sets = evaluations(record)
    hold = scenarios.baseline(record.chosen, Reading.HOLD, Condition.ALL)
    systems: list[tuple[str, System]] = [
        ("`prompt-tuner`", NOBODY),
        *((f"{reading.value}", record.chosen[reading]) for reading in Reading),
        ("`prompt-tuner` as it ships: it learns from earlier jobs", scenarios.LEARNS),
        ("INFless, instances hold and wait, which learns too", hold),
    ]
    return [(f"| {name} |", row(name, *_found(sets, system))) for name, system in systems]


def _found(sets: Sequence[Evaluation], system: System) -> tuple[str, str, str, str]:
    those = [one for one in sets if (MEDIUM.name, str(system)) in one.runs]
    late, between = over(those, lambda one: estimate(one.violations(MEDIUM, system))).shown()
    if system == NOBODY:
        return f"{late} %", between, "1", ""
    times, dearer = over(those, lambda one: one.times_the_cost(MEDIUM, system, NOBODY)).shown(digits=2)
    return f"{late} %", between if len(those) > 1 else "", times, dearer if len(those) > 1 else ""


def _judged(record: Record) -> str:
    sets = evaluations(record)
    found = list(report_bars.against_baselines(sets, record.chosen, Condition.NOBODY))
    missed = [bar for bar in found if bar.verdict == "**no**"]
    points = sum("points" in bar.what for bar in missed)
    return (
        f"Of the {len(found)} bars against these baselines, at medium and at high load,"
        f" {report_bars.held(found)} are met by their interval with this set,"
        f" and {sum(bar.sets == len(sets) for bar in found)} with every set. Even the mean misses {len(missed)};"
        f" {points} of these require fewer late jobs than under INFless."
    )


def main() -> int:
    for quote in quotes():
        lines = quote.path.read_text().split("\n")
        places = [place for place, line in enumerate(lines) if line.startswith(quote.begins)]
        if len(places) != 1:
            sys.stderr.write(f"{quote.path}: {len(places)} lines begin with {quote.begins!r}, not one\n")
            return 1
        lines[places[0]] = quote.line
        quote.path.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
