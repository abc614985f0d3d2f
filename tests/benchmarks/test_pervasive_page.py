from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import tables
from benchmarks.papers.pervasive import paper, predict, report
from benchmarks.papers.pervasive.__main__ import PAGE, PARAMETERS, RECORD, Kept, main, read_record
from stoker.contexts.recipe import Awareness
from stoker.manager.study.running import simulate_all_runs
from stoker.manager.study.scenario import load_scenario, shipped_scenarios

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
KEPT = msgspec.json.decode((FOLDER / PARAMETERS).read_bytes(), type=Kept)
FIRST = KEPT.fits[0].parameters
LONG_CALLS = [run for run in paper.RUNS if run.batch == 1000 or (run.awareness, run.batch) == (Awareness.FULL, 100)]


@pytest.mark.long
@pytest.mark.parametrize("run", LONG_CALLS, ids=lambda run: f"{run.awareness.value}-{run.batch}")
def test_page_matches_simulations_of_its_parameters(run: paper.Run) -> None:
    assert tables.row(*report.static_cells(run, predict.simulate_static_run(FIRST, run))) in (FOLDER / PAGE).read_text()


def test_numbers_of_figures_6_and_7_are_within_a_tenth_of_the_paper() -> None:
    rows = [
        line.split("|")
        for line in (FOLDER / PAGE).read_text().splitlines()
        if line.startswith(("| 6 |", "| 6, 7 |", "| 7 |"))
    ]
    assert len(rows) == len(paper.RUNS)
    for row in rows:
        assert abs(float(row[6].strip().rstrip("%"))) < 10.0


def test_shipped_scenarios_match_the_parameters() -> None:
    texts = predict.scenario_texts(FIRST)
    assert {f"{name}.toml" for name in shipped_scenarios() if name.startswith("context-paper")} == set(texts)
    for name, text in texts.items():
        assert (predict.FOLDER / name).read_text() == text


def test_shipped_scenario_reproduces_the_page(tmp_path: Path) -> None:
    scenario = load_scenario(shipped_scenarios()["context-paper-8"])
    [finished] = simulate_all_runs(scenario, policies=["default"], seeds=[0], folder=tmp_path)
    found = f"| {predict.BATCH} | {predict.NONE_LOST} | {finished.outcome.items:,} |"
    assert found in (FOLDER / PAGE).read_text()
    # the run ended with unfinished calls, because the last GPU was lost
    assert b'"complete":false' in msgspec.json.encode(finished.outcome)


@pytest.mark.long
def test_quick_reproduction_writes_a_page_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--jobs", "1", "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / PAGE).read_text()
    assert "## Figures 8 and 9: predicted" in page
    for word in page.split("](")[1:]:
        target = word.split(")")[0]
        assert (tmp_path / "new" / target).is_file(), target
    said = capsys.readouterr()
    assert said.out.strip().endswith(PAGE)
    assert "Figures 8 and 9: 1 of 1" in said.err


def test_page_matches_its_record() -> None:
    assert (FOLDER / PAGE).read_text() == report.write(read_record(FOLDER / RECORD))
