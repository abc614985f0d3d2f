"""The page on PromptTuner's evaluation: what it says of runs, the bars, the choice of settings, and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.prompt_tuner import ablations, drawing, paper, report, texts, tuning
from benchmarks.prompt_tuner.__main__ import PAGE, main
from benchmarks.prompt_tuner.bars import Bar, bars
from benchmarks.prompt_tuner.cases import (
    ELASTIC_FLOW,
    INFLESS,
    LOOK,
    MEDIUM,
    OURS,
    WHOLE_EXTENT,
    Case,
    Extent,
    System,
    at,
)
from benchmarks.prompt_tuner.everything import cases_of
from benchmarks.prompt_tuner.jobs import Bank
from benchmarks.prompt_tuner.parameters import Parameters
from benchmarks.prompt_tuner.result import Result
from benchmarks.prompt_tuner.runs import Runs
from benchmarks.prompt_tuner.summary import Evaluation, Search
from benchmarks.prompt_tuner.why import WHY

SYSTEMS = {OURS: System(OURS), INFLESS: System(INFLESS), ELASTIC_FLOW: System(ELASTIC_FLOW)}
FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
LEARNED = {policy: System(policy, (("learn", True),)) for policy in (INFLESS, ELASTIC_FLOW)}
FEW = Extent(seeds=(0, 1, 2), large_seeds=(0, 1))


def result(*, late: int = 0, held_s: float = 1000.0, round_s: float = 0.0001) -> Result:
    return Result(
        jobs=100, late=late, refused=0, unfinished=0, banked=90, loads=5, held_s=held_s, busy_s=held_s / 2,
        all_s=38_400.0, ended_at=1200.0, wait_share=0.1, wait_most=0.5, round_s=round_s, round_most_s=0.01,
    )  # fmt: skip


def evaluation(of: Callable[[Case], Result]) -> Evaluation:
    """Runs that came to what a function says of them."""
    searches = tuple(Search(SYSTEMS[policy], 20.0, 30.0) for policy in (INFLESS, ELASTIC_FLOW))
    return Evaluation({case: of(case) for case in cases_of(SYSTEMS, LEARNED, FEW)}, SYSTEMS, LEARNED, searches, FEW)


def as_hoped(case: Case) -> Result:
    """As the paper has it, roughly; one job more under each further seed."""
    policy = case.system.policy
    if policy != OURS:
        late = {INFLESS: 30, ELASTIC_FLOW: 60}[policy] - 5 * tuning.learns(case.system)
        return result(late=late + case.seed, held_s=1500.0)
    worse = case.system != ablations.WHOLE
    return result(late=(20 if worse else 12) + case.seed)


def held(of: Evaluation) -> dict[str, bool]:
    return {bar.what: bar.holds for bar in bars(of)}


def test_bars_hold_where_everything_is_as_hoped() -> None:
    found = list(bars(evaluation(as_hoped)))
    assert [bar.what for bar in found if not bar.holds] == []
    too = ("13.0 ± 0.0", True)
    assert found[0] == Bar("violations under `infless`'s, medium, S = 1", "by 10 points", "18.0 ± 0.0", True, too)
    assert len(found) == 4 + 4 + 1 + 5 + 1


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (lambda case: case.system.policy == INFLESS and case.counts[0][1] == 99, "violations under `infless`'s, high"),
        (lambda case: case.system == ablations.NO_PROMPTS, "violations without the bank"),
        (lambda case: case.system == ablations.TABLE_8["no-delay"], "violations without DelaySchedulable"),
    ],
)
def test_a_bar_that_is_missed_is_told(changed: Callable[[Case], bool], what: str) -> None:
    def changed_once(case: Case) -> Result:
        return result(late=12, held_s=1500.0) if changed(case) else as_hoped(case)

    missed = [name for name, holds in held(evaluation(changed_once)).items() if not holds]
    assert len(missed) == 1
    assert missed[0].startswith(what)


def test_a_case_that_is_worse_than_a_baseline_is_named_if_its_interval_says_so() -> None:
    def low_is_bad(case: Case) -> Result:
        bad = case.system == ablations.WHOLE and case.counts[0][1] == 41 and case.emergence == 0.5
        return result(late=40 + case.seed) if bad else as_hoped(case)

    found = next(bar for bar in bars(evaluation(low_is_bad)) if bar.wanted == "none")
    assert (found.holds, found.came) == (False, "low, S = 0.5 (infless)")

    def widely(case: Case) -> Result:
        return result(late=case.seed * 40) if case.system == ablations.WHOLE else as_hoped(case)

    assert next(bar for bar in bars(evaluation(widely)) if bar.wanted == "none").holds


def test_a_fixed_cluster_is_paid_for_whole() -> None:
    of = evaluation(as_hoped)
    price = MEDIUM.parameters.device_price_s
    assert of.costs(MEDIUM, SYSTEMS[ELASTIC_FLOW]) == [pytest.approx(38_400.0 * price)] * 3
    assert of.costs(MEDIUM, SYSTEMS[INFLESS]) == [pytest.approx(1500.0 * price)] * 3
    assert of.times_the_cost(MEDIUM, SYSTEMS[INFLESS], SYSTEMS[OURS]).mean == pytest.approx(1.5)


def test_the_page_sets_paper_and_ours_side_by_side(tmp_path: Path) -> None:
    of = evaluation(as_hoped)
    page = report.write(of)
    assert "| medium, S = 1 | 13.0 ± 2.5 | 31.0 ± 2.5 | 61.0 ± 2.5 | 1.4 ± 0.0 | 2.1 ± 0.0 | 54.6 ± 0.0 |" in page
    assert "| 7a: points under `infless`, medium | 15 to 25 | 18.0 ± 0.0 |" in page
    assert "| llama-30b | paper: % / $ | 28.4 / 38.8 | 38.9 / 46.4 | 82.3 / 69.4 |" in page
    assert "| without DelaySchedulable | 15.6 | 26.6 | 21.0 ± 2.5 | 1.4 ± 0.0 | +8.0 ± 0.0 | 1.00 ± 0.00 |" in page
    assert "| infless, bank budget | 20.0 | 30.0 | yes |" in page
    assert "| medium, S = 1 | 26.0 ± 2.5 | 13.0 ± 0.0 | 1.50 ± 0.00 | 56.0 ± 2.5 | 43.0 ± 0.0 | 38.40 ± 0.00 |" in page
    for path in drawing.draw(tmp_path, of):
        assert f"]({path.name})" in page
        assert path.stat().st_size > 1000


def test_of_settings_that_are_alike_the_cheapest_is_taken() -> None:
    def search(violations: float, cost: float, bank: Bank) -> Search:
        return Search(System(INFLESS, bank=bank), violations, cost)

    cheap = search(20.4, 25.0, Bank.ALWAYS)
    assert tuning.best([search(20.0, 30.0, Bank.BUDGET), cheap, search(21.0, 5.0, Bank.NEVER)]) == cheap.system


def test_settings_are_chosen_on_seeds_of_their_own() -> None:
    tried = {case.seed for case in tuning.cases(tuning.candidates(INFLESS))}
    assert tried == set(WHOLE_EXTENT.tuning_seeds)
    assert not tried & set(WHOLE_EXTENT.seeds)


def test_everything_is_run_once_and_the_paper_is_covered() -> None:
    wanted = set(cases_of(SYSTEMS, LEARNED, WHOLE_EXTENT))
    for load in paper.MAIN_LOADS:
        for emergence in paper.EMERGENCES:
            for system in SYSTEMS.values():
                assert set(at(load, emergence).cases(system, seeds=WHOLE_EXTENT.seeds)) <= wanted
    assert {case.gpus for case in wanted} == {32, 96}


# ---- the command


def test_an_evaluation_whose_runs_are_kept_is_written_without_doing_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path / "runs", jobs=1)
    tried = [system for policy in (INFLESS, ELASTIC_FLOW) for system in tuning.candidates(policy)]
    for case in tuning.cases(tried, extent=LOOK):
        runs.keep(case, as_hoped(case))
    best = {OURS: System(OURS)} | {policy: tuning.candidates(policy)[0] for policy in (INFLESS, ELASTIC_FLOW)}
    learned = {policy: tuning.candidates(policy)[1] for policy in (INFLESS, ELASTIC_FLOW)}
    for case in cases_of(best, learned, LOOK):
        runs.keep(case, as_hoped(case))
    kept = set((tmp_path / "runs").iterdir())
    assert main(["--quick", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "new")]) == 0
    assert set((tmp_path / "runs").iterdir()) == kept
    page = (tmp_path / "new" / PAGE).read_text()
    assert page.startswith(texts.HEAD)
    for word in page.split("](")[1:]:
        assert (tmp_path / "new" / word.split(")")[0]).is_file()
    assert capsys.readouterr().out.strip().endswith(PAGE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs", "none"], "a number from 1 to"),
        (["--quick"], "--quick wants --out"),
        (["--out", "{}/file"], "not a folder"),
        (["--runs", "{}/file"], "not a folder"),
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


def test_the_page_in_the_docs_is_written_by_this_code() -> None:
    page = (FOLDER / PAGE).read_text()
    assert page.startswith(texts.HEAD)
    assert page.endswith(texts.UNKNOWABLE)
    for name in WHY:
        assert f"| `{name}` | {report.value(getattr(Parameters(), name))} |" in page
    for word in page.split("](")[1:]:
        assert (FOLDER / word.split(")")[0]).stat().st_size < 100_000
