from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import tables
from benchmarks.papers.pervasive import claims, paper, predict, report
from benchmarks.papers.pervasive.__main__ import PAGE, PARAMETERS, RECORD, Kept, main, read_record
from benchmarks.papers.pervasive.predict import Prediction, rounded_up_percent
from stoker.contexts.recipe import Awareness
from stoker.manager.study.running import run_all
from stoker.manager.study.scenario import load_scenario, shipped

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
    assert {f"{name}.toml" for name in shipped() if name.startswith("context-paper")} == set(texts)
    for name, text in texts.items():
        assert (predict.FOLDER / name).read_text() == text


def test_shipped_scenario_reproduces_the_page(tmp_path: Path) -> None:
    scenario = load_scenario(shipped()["context-paper-8"])
    [finished] = run_all(scenario, policies=["default"], seeds=[0], folder=tmp_path)
    found = f"| {predict.BATCH} | {predict.NONE_LOST} | {finished.outcome.items:,} |"
    assert found in (FOLDER / PAGE).read_text()
    # the run ended with unfinished calls when the last GPU was lost
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


def test_invalid_parameters_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / PARAMETERS).write_text('{"starts": 3, "fits": [{"worst": 0.01}]}')
    with pytest.raises(SystemExit):
        main(["--keep-fits", "--out", str(tmp_path)])
    assert "has no parameter sets" in capsys.readouterr().err


def test_limits_are_rounded_up_and_the_page_contains_the_report() -> None:
    assert [rounded_up_percent(part) for part in (0.0203, 0.02, 0.0)] == ["2.1%", "2.0%", "0.0%"]
    run = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.FULL, 100))
    page = (FOLDER / PAGE).read_text()
    assert (
        f"numbers within {rounded_up_percent(abs(run.error(predict.simulate_static_run(FIRST, run))))}" in page
    )  # the largest error
    assert page.startswith(report.PAGE.read_text().partition("\n")[0])


def test_page_matches_its_record() -> None:
    assert (FOLDER / PAGE).read_text() == report.write(read_record(FOLDER / RECORD))


def test_no_result_of_the_paper_is_an_input_of_a_prediction() -> None:
    answers = {paper.FIGURE_9A_S, paper.FIGURE_9B_S}
    assert not answers & {*predict.RAMPS_9B_S, *(until_s for _, until_s, _, _ in predict.RAMPS_9A)}
    source = Path(predict.__file__).read_text()
    assert "FIGURE_9A_S" not in source
    assert "FIGURE_9B_S" not in source


def test_number_just_outside_an_interval_counts_as_outside() -> None:
    assert claims.verdict_text(100.0, [90.0, 110.0]) == "inside"
    assert claims.verdict_text(100.0, [90.0, 100.0]) == "inside, at its end"
    assert claims.verdict_text(100.0, [80.0, 99.9]) == "**outside** by 0.1%"
    assert claims.verdict_text(100.0, [80.0, 94.0]) == "**outside** by 6.0%"


def test_kept_variants_remain_valid_variants() -> None:
    found = read_record(FOLDER / RECORD)
    assert {one.variant for one in found.predictions[0]} > predict.KEPT_VARIANTS


def _ran(awareness: Awareness, variant: str, value: float, *, batch: int = predict.BATCH) -> Prediction:
    return Prediction("8", awareness, variant, batch, value, ())


def test_number_may_lie_between_variants_and_in_none() -> None:
    said = claims.PARTIAL.said
    rows = [
        [_ran(Awareness.DISK, "low", said - 20.0), _ran(Awareness.DISK, "high", said + 10.0)],
        [_ran(Awareness.DISK, "low", said - 10.0), _ran(Awareness.DISK, "high", said + 20.0)],
    ]
    assert claims.PARTIAL.distance_outside(rows, batch=predict.BATCH) == 0.0
    low, high = claims.PARTIAL.variants(rows, batch=predict.BATCH)
    assert (low, high) == (
        claims.Variant("low", said - 20.0, said - 10.0),
        claims.Variant("high", said + 10.0, said + 20.0),
    )
    assert not low.includes(said)
    assert not high.includes(said)
    assert low.includes(said - 20.0)


def test_full_and_partial_are_paired_by_start_and_call_size() -> None:
    row = [
        _ran(Awareness.DISK, "from 900 s", 100.0),
        _ran(Awareness.DISK, "from 960 s", 200.0),
        _ran(Awareness.DISK, "from 900 s", 1000.0, batch=1000),
        _ran(Awareness.FULL, "from 900 s, 3 A10 lost at 60 s", 110.0),
        _ran(Awareness.FULL, "from 960 s, 3 A10 lost at 60 s", 240.0),
        _ran(Awareness.FULL, predict.NONE_LOST, 150.0),
        _ran(Awareness.FULL, "from 900 s, 3 A10 lost at 60 s", 500.0, batch=1000),
    ]
    assert claims.pairs([row], batch=predict.BATCH) == {"from 900 s": [1.1], "from 960 s": [1.2]}
    assert claims.pairs([row], batch=predict.BATCH, none_lost=True) == {"from 900 s": [1.5]}
    assert claims.pairs([row], batch=1000) == {"from 900 s": [0.5]}


def test_ratios_of_the_paper_follow_from_its_rounded_times() -> None:
    said = {(run.awareness, run.batch): run.seconds for run in paper.RUNS}
    for one in paper.REDUCTIONS:
        ratio = 1.0 - said[one.awareness, predict.BATCH] / said[one.against, predict.BATCH]
        assert one.part == pytest.approx(ratio, abs=0.005)
    full = [seconds for (awareness, _), seconds in said.items() if awareness is Awareness.FULL]
    assert pytest.approx(max(full) / min(full) - 1.0, abs=0.005) == paper.SPREAD
