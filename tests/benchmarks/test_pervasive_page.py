"""The page of the reproduction that is in the repository: its numbers are those that its parameters give."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.pervasive import claims, paper, predict, report, scenario_files
from benchmarks.pervasive.__main__ import PAGE, PARAMETERS, RECORD, Kept, main, read
from stoker.contexts.recipe import Awareness
from stoker.manager.study.running import run_all
from stoker.manager.study.scenario import load_scenario, shipped

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
KEPT = msgspec.json.decode((FOLDER / PARAMETERS).read_bytes(), type=Kept)
FIRST = KEPT.fits[0].parameters
LONG_CALLS = [run for run in paper.RUNS if run.batch == 1000 or (run.awareness, run.batch) == (Awareness.FULL, 100)]


@pytest.mark.parametrize("run", LONG_CALLS, ids=lambda run: f"{run.awareness.value}-{run.batch}")
def test_the_page_has_what_its_parameters_give_in_the_simulator(run: paper.Run) -> None:
    assert report.static_row(run, predict.static(FIRST, run)) in (FOLDER / PAGE).read_text()


def test_each_number_of_figures_6_and_7_is_within_a_tenth_of_the_papers() -> None:
    rows = [
        line.split("|")
        for line in (FOLDER / PAGE).read_text().splitlines()
        if line.startswith(("| 6 |", "| 6, 7 |", "| 7 |"))
    ]
    assert len(rows) == len(paper.RUNS)
    for row in rows:
        assert abs(float(row[6].strip().rstrip("%"))) < 10.0


def test_shipped_scenarios_are_what_the_parameters_give() -> None:
    texts = scenario_files.texts(FIRST)
    assert {f"{name}.toml" for name in shipped() if name.startswith("context-paper")} == set(texts)
    for name, text in texts.items():
        assert (scenario_files.FOLDER / name).read_text() == text


def test_a_shipped_scenario_gives_what_the_page_says(tmp_path: Path) -> None:
    scenario = load_scenario(shipped()["context-paper-8"])
    [finished] = run_all(scenario, policies=["default"], seeds=[0], folder=tmp_path)
    found = f"| {predict.BATCH} | {predict.NONE_LOST} | {finished.outcome.items:,} |"
    assert found in (FOLDER / PAGE).read_text()
    assert b'"complete":false' in msgspec.json.encode(finished.outcome)  # cut off when the last GPU is gone


def test_figures_are_small() -> None:
    for picture in FOLDER.glob("*.png"):
        assert picture.stat().st_size < 100_000


def test_a_quick_reproduction_writes_a_page_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--jobs", "1", "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / PAGE).read_text()
    assert "## Figures 8 and 9: predicted" in page
    for word in page.split("](")[1:]:
        target = word.split(")")[0]
        assert (tmp_path / "new" / target).is_file(), target
    said = capsys.readouterr()
    assert said.out.strip().endswith(PAGE)
    assert "Figures 8 and 9: 1 of 1" in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fits", "0"], "a number from 1 to"),
        (["--jobs", "many"], "a number from 1 to"),
        (["--quick"], "--quick wants --out"),
        (["--quick", "--keep-fits", "--out", "{}"], "leave out one of"),
        (["--keep-fits", "--out", "{}"], "cannot be read"),
        (["--out", "{}/file"], "not a folder"),
    ],
)
def test_what_cannot_be_asked_is_said(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main([word.replace("{}", str(tmp_path)) for word in arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_parameters_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / PARAMETERS).write_text('{"starts": 3, "fits": [{"worst": 0.01}]}')
    with pytest.raises(SystemExit):
        main(["--keep-fits", "--out", str(tmp_path)])
    assert "holds no parameter sets" in capsys.readouterr().err


def test_limits_are_rounded_up_and_the_page_has_the_text_of_the_report() -> None:
    assert [report.at_most(part) for part in (0.0203, 0.02, 0.0)] == ["2.1%", "2.0%", "0.0%"]
    run = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.FULL, 100))
    page = (FOLDER / PAGE).read_text()
    assert f"numbers within {report.at_most(abs(run.error(predict.static(FIRST, run))))}" in page  # the worst of them
    assert page.startswith(report.HEAD)


def test_the_page_is_what_its_record_says() -> None:
    assert (FOLDER / PAGE).read_text() == report.write(read(FOLDER / RECORD))


def test_no_answer_of_the_paper_is_among_the_inputs_of_a_prediction() -> None:
    answers = {paper.FIGURE_9A_S, paper.FIGURE_9B_S}
    assert not answers & {*predict.RAMPS_9B_S, *(until_s for _, until_s, _, _ in predict.RAMPS_9A)}
    source = Path(predict.__file__).read_text()
    assert "FIGURE_9A_S" not in source
    assert "FIGURE_9B_S" not in source


def test_a_prediction_may_be_off_by_as_much_as_the_fit() -> None:
    assert claims.judged(100.0, [90.0, 110.0], within=0.05) == "inside"
    assert claims.judged(100.0, [80.0, 96.0], within=0.05) == "outside by 4.0%, which the fit may be off too"
    assert claims.judged(100.0, [80.0, 94.0], within=0.05) == "**outside**, by 6.0%"
