from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.papers import common
from benchmarks.papers.arlo import report, summary
from benchmarks.papers.arlo.cases import (
    ARLO,
    ARLO_EVEN,
    ARLO_GLOBAL,
    DT,
    INFAAS,
    INFAAS_SHORT,
    ST,
    Case,
    Measures,
    Result,
)
from benchmarks.papers.arlo.measured import Measured, records
from benchmarks.papers.arlo.tables import TABLES
from benchmarks.papers.arlo.workload import missing

Stored = common.Store[Case, Result]
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reproduction"
here = pytest.mark.skipif(bool(missing()), reason=missing())


def result_of(case: Case, mean_ms: float, *, p98_ms: float = 9.0, out: int = 0, lost: int = 0) -> Result:
    measures = Measures(
        requests=1000, lost=lost, mean_ms=mean_ms, p50_ms=1.0, p98_ms=p98_ms, late=0.01, devices=5.0, replaced=1,
        most_out=out, at_once=2,
    )  # fmt: skip
    return Result(case, common.RELEASE, measures, took_s=0.004)


def kept(folder: Path, results: list[Result], measured: Measured | None = None) -> Stored:
    path = folder / "arlo.json"
    path.write_bytes(msgspec.json.encode({"measured": measured, "runs": results}))
    return records(path)


def findings(of: Stored) -> dict[str, tuple[summary.Finding, ...]]:
    return {verdict.bar: verdict.findings for verdict in summary.verdicts(of)}


MEANS = {
    ST: 10.0, DT["flat"]: 3.5, DT["rising"]: 4.0, DT["falling"]: 6.0, INFAAS: 90.0, INFAAS_SHORT: 4.5, ARLO: 3.0
}  # fmt: skip


@here
def test_bar_is_met_if_the_measured_range_contains_the_paper_value(tmp_path: Path) -> None:
    found = findings(kept(tmp_path, [result_of(c, MEANS[c.system]) for c in TABLES["6a"]() if c.system in MEANS]))
    assert found["Figure 6a: the mean is below ST's by"][0].cells == ["70.0 %", "**no**"]
    dt = found["Figure 6a: the mean is below DT's by"]
    assert dt[0].cells == ["14.3 to 50.0 %", "yes: between two readings"]
    assert dt[1].cells == ["–", "not run"], "the other reading of the allocation"
    lowest = found["Figure 6a: the mean is below each other system's, in each run"][0]
    assert lowest.cells == ["18 of 18", "yes"]
    order = found["Figure 6a: means in the order Arlo, DT, INFaaS, ST, in each run and reading"][0]
    assert order.cells == ["6 of 18", "**no**: 3 of 3 with `dt, flat` and `infaas, short queues`"]


@here
def test_single_deviating_run_fails_the_order_and_limit_checks(tmp_path: Path) -> None:
    means = {ARLO_EVEN: 30.0, ARLO_GLOBAL: 20.0, ARLO: 10.0}
    results = [result_of(case, means[case.system]) for case in TABLES["3"]() if case.system in means]
    name = "Table 3: the mean in the order Arlo, Global, Even"
    assert findings(kept(tmp_path, results))[name][0].cells == ["3 of 3", "yes"]
    limit = "All runs: instances out of service at once are within the limit, and no request is lost"
    assert findings(kept(tmp_path, results))[limit][0].is_met is True
    worse = [result_of(results[0].case, 5.0), *results[1:]]
    assert findings(kept(tmp_path, worse))[name][0].cells == ["2 of 3", "**no**"]
    for bad in (result_of(results[0].case, 30.0, out=3), result_of(results[0].case, 30.0, lost=1)):
        assert findings(kept(tmp_path, [bad, *results[1:]]))[limit][0].is_met is False


@here
def test_page_matches_its_records() -> None:
    assert (FOLDER / "arlo.md").read_text() == report.write(records(FOLDER / "arlo.json"))


@here
def test_records_contain_exactly_all_cases() -> None:
    of = records(FOLDER / "arlo.json")
    cases = {case.name for several in TABLES.values() for case in several()}
    assert {result.case.name for result in of.kept.runs} == cases
    assert of.kept.measured is not None
