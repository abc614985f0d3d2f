from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import common
from benchmarks.papers.schedmate.scheduling import intervals, records, report, settings, simulate
from benchmarks.papers.schedmate.scheduling.intervals import Interval
from benchmarks.papers.schedmate.scheduling.records import CaseResult, ErrorFacts, Records, WindowFacts
from benchmarks.papers.schedmate.scheduling.simulate import OURS, Measures
from benchmarks.papers.schedmate.scheduling.trace import missing

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reproduction"
KEPT = Records(FOLDER / "schedmate.json")
"""Return the records from which the page and figures are made."""
here = pytest.mark.skipif(bool(missing()), reason=missing())


def test_page_matches_its_records() -> None:
    assert (FOLDER / "schedmate.md").read_text() == report.write(KEPT)


def test_records_contain_every_case_and_every_window() -> None:
    of = KEPT
    assert {result.case.name for result in of.kept.runs} == {case.name for case in simulate.cases()}
    assert {len(result.windows) for result in of.kept.runs} == {len(of.kept.windows)}
    assert len({result.release for result in of.kept.runs}) == 1, "all by one release"
    assert of.kept.fixed_on == settings.FIXED_ON

    assert of.kept.summary == report.summary(of)


@here
def test_records_use_the_windows_of_the_trace() -> None:
    assert KEPT.kept.windows == records.facts()


def with_ratio(folder: Path, ratio: float) -> Records:
    """Return records in which our policy takes half the time of FIFO in one cluster, and `ratio` times in another."""
    of = Records(folder / "schedmate.json")
    of.kept.windows = [
        WindowFacts(cluster, week, 100, 60.0, 6.0, (8, 8, 8)) for cluster in ("a", "b") for week in range(3)
    ]
    for case in simulate.cases():
        factors = (0.5, 0.5, 0.5, ratio, ratio, ratio) if case.system == OURS else (1.0,) * 6
        means = [factor * (100.0 + place) for place, factor in enumerate(factors)]
        found = tuple(Measures(mean, 1.0, 1.0, 1.0, 0) for mean in means)
        of.store.found[case.name] = CaseResult(case, common.RELEASE, 0.0, found)
    of.kept.errors = {system: ErrorFacts(0.9, 0.8) for system in simulate.ERRORS}
    return of


def test_cluster_in_which_our_policy_is_worse_misses_the_bar(tmp_path: Path) -> None:
    assert "| yes, in all 9 |" in report.bars(report.Cells(with_ratio(tmp_path, 0.9)))
    broken = report.bars(report.Cells(with_ratio(tmp_path, 1.4)))
    assert "**no**: `b`, load 0.6: 1.40 (1.40 to 1.40)" in broken
    assert "`a`" not in broken


def test_interval_of_a_paired_ratio_is_narrower_than_of_its_parts() -> None:
    """The second policy always takes 10 % longer, but times differ widely between weeks."""
    strata = ("a",) * 4 + ("b",) * 4
    ours = [100.0, 1000.0, 300.0, 50.0, 20.0, 4000.0, 90.0, 700.0]
    theirs, jobs = [1.1 * each for each in ours], [1.0] * 8
    mean = intervals.interval(intervals.pooled_mean(ours, jobs), strata)
    ratio = intervals.interval(intervals.pooled_ratio(theirs, ours, jobs), strata)
    assert mean.high > 1.5 * mean.low
    assert (ratio.low, ratio.high) == (pytest.approx(1.1), pytest.approx(1.1))
    assert ratio.is_above_one
    assert not Interval(1.1, 0.99, 1.2).is_above_one
