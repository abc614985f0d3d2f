"""`python -m benchmarks.quotes`: update numbers in README and docs from the records.

Each quote is a whole line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks import quoted_records
from benchmarks.harness import ROOT
from benchmarks.papers.pervasive import report as context
from benchmarks.papers.pervasive.__main__ import RECORD as CONTEXT_RECORD
from benchmarks.papers.pervasive.__main__ import read_record as read_context
from benchmarks.papers.prompt_tuner import report as tuner
from benchmarks.papers.prompt_tuner.scenarios import MEDIUM, OURS
from benchmarks.papers.prompt_tuner.searching import mean_text, read_record
from benchmarks.tables import row
from stoker.manager.study.statistics import estimate_mean

FOLDER = ROOT / "docs" / "reproduction"


class Quote(NamedTuple):
    path: Path
    begins: str
    line: str


def quotes() -> list[Quote]:
    page = tuner.Page(read_record(FOLDER / tuner.RECORD))
    performance = ROOT / "docs" / "performance.md"
    found = [Quote(performance, begins, line) for begins, line in _schedulers(page)]
    condition = (
        f"In the simulator, at medium load on 32 GPUs with S = 1 ({len(page.grid.judge.seeds)} seeds, 95 % intervals)."
        " As in the paper, no scheduler learns from earlier jobs:"
    )
    found.append(Quote(performance, "In the simulator, at medium load", condition))
    found.append(Quote(performance, "Targets (bars) against these baselines", _judged_text(page)))
    found.append(
        Quote(
            performance,
            "Figures 6 and 7 of the context paper",
            context.quotation(read_context(FOLDER / CONTEXT_RECORD)),
        )
    )
    found += [Quote(ROOT / "README.md", begins, line) for begins, line in quoted_records.front_page_rows()]
    lines = (
        *quoted_records.peer_rows(), *quoted_records.awareness(), *quoted_records.lost_rows(),
        quoted_records.whole_run(), quoted_records.preempted_row(), quoted_records.fidelity(),
        quoted_records.gpu(), quoted_records.tuning(),
    )  # fmt: skip
    found += [Quote(performance, begins, line) for begins, line in lines]
    benchmarks, bank = ROOT / "benchmarks" / "FINDINGS.md", ROOT / "docs" / "prompt-bank.md"
    found += [
        Quote(path, begins, line)
        for path, (begins, line) in zip((benchmarks, bank), quoted_records.quality(), strict=True)
    ]
    spread = quoted_records.prompt_spread()
    found.append(Quote(benchmarks, "20 random prompts of `claims`", f"{spread} (Figure 2c; no bar)."))
    return found


def _schedulers(page: tuner.Page) -> list[tuple[str, str]]:
    one = page.one
    lines = [("`prompt-tuner`", f"{mean_text(estimate_mean(one.late(MEDIUM, OURS)))} %", "", "1")]
    for name, system in page.baselines.items():
        late, points = (
            mean_text(estimate_mean(one.late(MEDIUM, system))),
            mean_text(one.points(MEDIUM, system), sign=True),
        )
        lines.append((name, f"{late} %", points, mean_text(one.times(MEDIUM, system), digits=2)))
    return [(f"| {cells[0]} |", row(*cells)) for cells in lines]


def _judged_text(page: tuner.Page) -> str:
    told = []
    for bar in tuner.baseline_bars(page):
        said = f"; the paper has {bar.paper}" if bar.paper else ""
        told.append(f"{bar.name}, {bar.wanted:g} {bar.what} ({bar.verdict.strip('*')}{said})")
    return f"Targets (bars) against these baselines: {'; '.join(told)}."


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
