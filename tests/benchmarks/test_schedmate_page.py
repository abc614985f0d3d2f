from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import common
from benchmarks.papers.schedmate.scheduling import report, settings, simulate
from benchmarks.papers.schedmate.scheduling.simulate import (
    OURS,
    Case,
    CaseResult,
    ErrorFacts,
    Measures,
    WindowFacts,
    missing,
)

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reproduction"
KEPT = simulate.records(FOLDER / "schedmate.json")
"""The records from which the page and figures are made."""
here = pytest.mark.skipif(bool(missing()), reason=missing())


def test_page_matches_its_records() -> None:
    assert (FOLDER / "schedmate.md").read_text() == report.write(KEPT)


def test_records_contain_every_case_and_every_window() -> None:
    of = KEPT
    assert {result.case.name for result in of.kept.runs} == {case.name for case in simulate.cases()}
    assert {len(result.windows) for result in of.kept.runs} == {len(of.kept.windows)}
    assert len({result.release for result in of.kept.runs}) == 1, "all by one release"
    assert of.kept.fixed_on == settings.FIXED_ON


@here
def test_records_use_the_windows_of_the_trace() -> None:
    assert KEPT.kept.windows == simulate.facts()


def with_ratio(folder: Path, ratio: float) -> common.Store[Case, CaseResult]:
    """Return records: in one cluster our policy takes half of FIFO's time, in another `ratio` of FIFO's time."""
    of = simulate.records(folder / "schedmate.json")
    of.kept.windows = [
        WindowFacts(cluster, week, 100, 60.0, 6.0, (8, 8, 8)) for cluster in ("a", "b") for week in range(3)
    ]
    for case in simulate.cases():
        factors = (0.5, 0.5, 0.5, ratio, ratio, ratio) if case.system == OURS else (1.0,) * 6
        means = [factor * (100.0 + place) for place, factor in enumerate(factors)]
        found = tuple(Measures(mean, 1.0, 1.0, 1.0, 0) for mean in means)
        of.found[case.name] = CaseResult(case, common.RELEASE, 0.0, found)
    of.kept.errors = {system: ErrorFacts(0.9, 0.8) for system in simulate.ERRORS}
    return of


def bars(folder: Path, ratio: float) -> str:
    return common.rows_text(report.bar_rows(report.Cells(with_ratio(folder, ratio))))


def test_cluster_in_which_our_policy_is_worse_misses_the_bar(tmp_path: Path) -> None:
    assert "| yes, in all 9 |" in bars(tmp_path, 0.9)
    broken = bars(tmp_path, 1.4)
    assert "**no**: `b`, load 0.6: 1.40 (1.40 to 1.40)" in broken
    assert "`a`" not in broken
