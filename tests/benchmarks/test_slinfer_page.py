"""SLINFER's page: results are kept and not computed twice, and stand beside the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.slinfer import data, records, report
from benchmarks.slinfer.cases import SLLM_C, SLLM_CS, Case, Result
from benchmarks.slinfer.measures import TTFT_POINTS_S, KindUse, Measures
from benchmarks.slinfer.records import Records
from benchmarks.slinfer.tables import TABLES

here = pytest.mark.skipif(bool(data.missing()), reason=data.missing())


def _result(case: Case, *, strict: float = 0.9, mean: float = 0.95, gpus: float = 2.0) -> Result:
    kinds = {"gpu": KindUse(nodes=gpus, instances=gpus, tokens_per_s=50.0, running=2.0)}
    measures = Measures(
        requests=10, met_strict=strict, met_mean=mean, dropped=0.0, moved=0.0, ttft=(0.5,) * len(TTFT_POINTS_S),
        kinds=kinds, loads=1,
    )  # fmt: skip
    return Result(case, records.code_digest(case.system), measures, {}, took_s=0.1, engine_steps=1)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Case]]:
    """Where records are kept, and the cases that are run."""
    ran: list[Case] = []

    def run(case: Case) -> Result:
        ran.append(case)
        return _result(case)

    monkeypatch.setattr(records, "run", run)
    return tmp_path / "slinfer.json", ran


def test_a_case_is_run_once_and_again_when_its_code_has_changed(
    kept: tuple[Path, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = kept
    cases = [Case(SLLM_CS, 32), Case(SLLM_C, 32), Case(SLLM_CS, 32)]
    told: list[str] = []
    Records(path).bring(cases, tell=told.append)
    assert (len(ran), len(told)) == (2, 2)
    Records(path).bring(cases, tell=told.append)
    assert len(ran) == 2
    monkeypatch.setattr(records, "code_digest", lambda system: f"another, of {system}")
    Records(path).bring(cases[:1], tell=told.append)
    assert ran[2:] == [Case(SLLM_CS, 32)]


def test_a_file_that_holds_no_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slinfer.json"
    path.write_text('{"of": "something else"}')
    with pytest.raises(ValueError, match="holds no results"):
        Records(path)


@here
def test_the_page_says_which_numbers_are_within_the_bars_of_the_papers(kept: tuple[Path, list[Case]]) -> None:
    path, _ = kept
    results = [
        _result(Case(SLLM_CS, 32), strict=0.96, mean=0.97, gpus=2.3),  # 99 % and 2.0 GPUs
        _result(Case(SLLM_CS, 64), strict=0.80, mean=0.85, gpus=3.0),  # 93 % and 3.6
        _result(Case(SLLM_CS, 128), strict=0.60, mean=0.70, gpus=4.0),  # 65 % and 4.0
    ]
    path.write_bytes(msgspec.json.encode(results))
    page = report.write(Records(path))
    assert "| 32 x 7B | `sllm+c+s` | 2.3 | 2.0 |" in page
    assert "| 96.0 to 97.0 | 99 | yes |" in page
    assert "| 80.0 to 85.0 | 93 | **no**: -0.6 GPUs, -8.0 points |" in page
    assert "| 60.0 to 70.0 | 65 | yes |" in page


def test_every_table_names_cases_that_are_told_apart() -> None:
    for name, cases in TABLES.items():
        names = [case.name for case in cases()]
        assert len(names) == len(set(names)), name
