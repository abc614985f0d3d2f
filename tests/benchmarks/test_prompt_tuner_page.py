from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness import Facts
from benchmarks.papers import common
from benchmarks.papers.prompt_tuner import report
from benchmarks.papers.prompt_tuner.__main__ import PAGE, QUICK_SMALLER, main, quick
from benchmarks.papers.prompt_tuner.report import Page
from benchmarks.papers.prompt_tuner.scenarios import (
    HEAVY,
    LITERAL,
    OURS,
    PARTS,
    VICUNA,
    Case,
    System,
    read_grid,
)
from benchmarks.papers.prompt_tuner.searching import (
    Book,
    Record,
    Run,
    judged_runs,
    read_record,
    runs_in,
    search,
)
from benchmarks.papers.prompt_tuner.simulate import Result

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
SMALL = quick(read_grid())
GRID = msgspec.structs.replace(
    SMALL, draws=3, search=msgspec.structs.replace(SMALL.search, looked_at=2),
    judge=msgspec.structs.replace(SMALL.judge, few=2),
)  # fmt: skip
FACTS = Facts("python -m benchmarks.papers.prompt_tuner", "abc", "a machine", "2026-11-30", (0.5, 1.0))
CHEAP = next(part.system for part in PARTS if not part.dearer)
Late = Callable[[System], int]


def result(case: Case, *, late: int, held_s: float) -> Result:
    alone = "vicuna-7b" in dict(case.counts) and len(case.counts) == 1
    return Result(
        jobs=1000, late=late, refused=0, unfinished=0, banked=900, loads=5, held_s=held_s, busy_s=held_s / 2,
        all_s=2_000.0, ended_at=1200.0, start_share=0.25 if alone else 0.1, start_most=0.5,
    )  # fmt: skip


def as_in_the_paper(system: System) -> int:
    """Return a number of late jobs per 1,000 that is close to the paper."""
    if system == OURS:
        return 120
    return {"infless": 330, "elastic-flow": 620}.get(system.policy, 160)


@cache
def made(late: Late = as_in_the_paper) -> Record:
    """Return a record whose runs have `late` late jobs plus ten for each further seed."""

    def simulate(cases: list[Case]) -> list[Result]:
        found = []
        for case in cases:
            held_s = 1000.0 if case.system == OURS else 900.0 if case.system == CHEAP else 1400.0
            found.append(result(case, late=late(case.system) + 10 * (case.seed % 20), held_s=held_s + case.seed - 1.0))
        return found

    book = Book(GRID, simulate=simulate)
    book.bring(judged_runs(search(book), GRID))
    return Record(FACTS, GRID, tuple(sorted(book.kept.values(), key=lambda run: run.name)))


def test_bars_are_met_by_the_results_of_the_paper() -> None:
    found = list(report.baseline_bars(Page(made())))
    assert [bar.name for bar in found] == [name for name in Page(made()).baselines for _ in range(2)]
    assert {bar.verdict for bar in found} == {"met"}
    assert {sign for pair in report.part_signs(Page(made())) for sign in pair} == {"as in the paper"}
    assert "By the mean, all agree." in report.write(made())


def test_page_shows_the_paper_and_our_results_side_by_side() -> None:
    page = report.write(made())
    assert "| INFless, literal | points more late jobs | 15 to 25 | 10 | 21.0 ± 0.0 | met |" in page
    assert "| without DelaySchedulable | +3.2 | +4.0 ± 0.0 | as in the paper | 1.16 |" in page
    assert "| llama-30b, the paper | 28.4 | 38.9 | 82.3 | 38.8 | 46.4 | 69.4 |" in page
    assert f"| {VICUNA[0].name} | 72.5 ± 0.3 | 56 | 25.0 ± 0.0, at most 50 | 11, at most 50 |" in page
    assert page.partition("\n\nThe paper is")[0].count("\n- ") == 10


def test_record_without_a_run_is_refused() -> None:
    record = made()
    lacking = [run for run in record.runs if (run.group, run.system) != (HEAVY[0].name, str(LITERAL))]
    with pytest.raises(LookupError, match="the record lacks"):
        report.write(msgspec.structs.replace(record, runs=tuple(lacking)))


@pytest.mark.long
def test_page_is_written_from_stored_runs_without_simulating(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = runs_in(tmp_path / "runs")

    def simulate(cases: list[Case]) -> list[Result]:
        found = [result(case, late=as_in_the_paper(case.system) + case.seed, held_s=1000.0) for case in cases]
        for case, each in zip(cases, found, strict=True):
            runs.found[case.name] = Run(case, common.RELEASE, each)
        runs.write()
        return found

    book = Book(SMALL, simulate=simulate, smaller=QUICK_SMALLER)
    book.bring(judged_runs(search(book), SMALL))
    before = (tmp_path / "runs" / "runs.json").read_bytes()
    assert main(["--quick", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "runs" / "runs.json").read_bytes() == before
    page = (tmp_path / "new" / PAGE).read_text()
    for word in page.split("](")[1:]:
        assert (tmp_path / "new" / word.split(")")[0]).is_file()
    assert capsys.readouterr().out.strip().endswith(PAGE)
    assert main(["--page-only", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / PAGE).read_text() == page


def test_page_in_the_docs_matches_its_record() -> None:
    page, record = (FOLDER / PAGE).read_text(), read_record(FOLDER / report.RECORD)
    assert page == report.write(record)
    assert record.grid == read_grid()
    for word in page.split("](")[1:]:
        assert (FOLDER / word.split(")")[0]).stat().st_size < 500_000


def test_results_use_seeds_that_the_search_did_not_use() -> None:
    grid = read_grid()
    judge = {seed for one in judged_runs(search(Book(GRID, made().runs)), grid) for seed in one.seeds}
    assert judge == set(grid.judge.seeds)
    assert not judge & {*grid.search.seeds, *grid.search.more_seeds, *grid.search.tuning_seeds}
