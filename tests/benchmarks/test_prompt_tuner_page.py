"""PromptTuner's page: runs, bars, the choice of settings, and the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness import Facts
from benchmarks.papers.prompt_tuner import (
    drawing,
    everything,
    paper,
    report,
    report_bars,
    report_sets,
    scenarios,
    searching,
)
from benchmarks.papers.prompt_tuner.__main__ import LOOK, PAGE, main
from benchmarks.papers.prompt_tuner.everything import RunSelection
from benchmarks.papers.prompt_tuner.grid import every_choice, read_grid
from benchmarks.papers.prompt_tuner.record import KeptRun, Page, Record, evaluations, keep, read
from benchmarks.papers.prompt_tuner.report_bars import Bar
from benchmarks.papers.prompt_tuner.report_sets import apart_at_the_same_cost, sets_that_count, short, still_within
from benchmarks.papers.prompt_tuner.scenarios import (
    ELASTIC_FLOW,
    HEAVY,
    HIGH,
    INFLESS,
    MAIN,
    MEDIUM,
    NOBODY,
    TUNING_SEEDS,
    VICUNA,
    Case,
    Condition,
    Group,
    Reading,
    System,
    at,
    of_bank,
)
from benchmarks.papers.prompt_tuner.searching import Anchored, Runs, Search, Searched
from benchmarks.papers.prompt_tuner.simulate import Result
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.statistics import MeanEstimate

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
GRID = read_grid()
SETS = tuple(every_choice(GRID)[:2])
CHOSEN = {reading: searching.candidates(reading)[0] for reading in Reading}
SEEDS, FEW = (11, 12, 13), (11, 12)
FACTS = Facts("python -m benchmarks.papers.prompt_tuner", "abc", "a machine", "2026-11-26", (0.5, 1.0))
Late = Callable[[Group, System], int]


def result(*, late: int = 0, held_s: float = 1000.0, round_s: float = 0.0001) -> Result:
    return Result(
        jobs=100, late=late, refused=0, unfinished=0, banked=90, loads=5, held_s=held_s, busy_s=held_s / 2,
        all_s=38_400.0, ended_at=1200.0, wait_share=0.1, wait_most=0.5, round_s=round_s, round_most_s=0.01,
    )  # fmt: skip


def as_hoped(group: Group, system: System) -> int:
    """Return a run's number of late jobs, about as in the paper."""
    if system.policy != scenarios.NOBODY.policy:
        return {INFLESS: 30, ELASTIC_FLOW: 60}[system.policy]
    return 12 if system in (NOBODY, scenarios.LEARNS) else 20


@cache
def made(late: Late = as_hoped) -> Record:
    """Return a record whose runs have `late` late jobs, one more with each further seed."""
    runs = []
    for number, choice in enumerate(SETS):
        wanted = everything.central(CHOSEN) if not number else everything.others(CHOSEN)
        for group, system in dict.fromkeys(wanted):
            cheap = system == scenarios.TABLE_8["no-warm-allocator"]
            dear = system.policy != NOBODY.policy or system not in (NOBODY, scenarios.LEARNS)
            for seed in SEEDS[:2] if group == HEAVY[-1] else FEW if number else SEEDS:
                held_s = 900.0 if cheap else 1500.0 if dear else 1000.0
                found = result(late=late(group, system) + seed - 11, held_s=held_s + (seed if dear or cheap else 0))
                runs.append(KeptRun.of(choice, group, system, seed, found))
    anchors = tuple(Anchored(choice, (1, 2), ((12.0, 13.0), (50.0, 60.0), (3.0, 3.2))) for choice in SETS)
    searched = Searched((anchors, anchors, anchors), 0.2, SETS)
    searches = tuple(Search(reading, system, 20.0, 30.0) for reading, system in CHOSEN.items())
    return Record(FACTS, searched, SETS, searches, CHOSEN, SEEDS, FEW, tuple(runs))


def against(record: Record, condition: Condition = Condition.NOBODY) -> dict[str, Bar]:
    found = report_bars.against_baselines(evaluations(record), record.chosen, condition)
    return {bar.what: bar for bar in found}


def but(late: int, group: Group | None = None, system: System | None = None) -> Record:
    """Return `as_hoped` results, but `late` for this group or system."""
    return made(lambda g, s: late if group in (None, g) and system in (None, s) else as_hoped(g, s))


def test_bars_hold_where_everything_is_as_hoped() -> None:
    of = made()
    assert len(against(of)) == 4 * 4
    assert [what for what, bar in against(of).items() if bar.verdict != "yes" or bar.sets != 2] == []
    for _, more, times in report_bars.ablation_bars(evaluations(of)):
        assert (more.verdict, times.verdict) == ("yes", "yes")
    assert report_bars.worse_than(evaluations(of)[0], CHOSEN) == []


@pytest.mark.parametrize(
    ("group", "reading", "load"), [(HIGH, Reading.HOLD, "high"), (MEDIUM, Reading.FIXED, "medium")]
)
def test_a_missed_bar_and_a_reversed_sign_are_told(group: Group, reading: Reading, load: str) -> None:
    found = against(but(15, group, CHOSEN[reading]))
    what = f"points that fewer jobs are late than under {reading.value}, {load} load"
    assert [name for name, bar in found.items() if bar.verdict != "yes"] == [what]
    assert found[what].sets == 0
    harmless = evaluations(but(12, system=scenarios.NO_PROMPTS))
    signs = {part.what: more.verdict for part, more, _ in report_bars.ablation_bars(harmless)}
    assert signs.pop("without the bank") == "**no**"
    assert set(signs.values()) == {"yes"}


def test_results_opposite_to_the_papers_are_listed_in_short() -> None:
    def said(of: Record) -> str:
        page = " ".join(short(Page(of)).split())
        return page.split("by the most central set where no other is named: ")[1]

    reversed_, not_seen = said(but(50, HEAVY[-1])).split(" Not seen, where the paper has it: ")
    assert reversed_ == "nothing."
    assert "with 2,000 candidates many more violations and a much higher cost (+0.0 ± 0.0 points" in not_seen
    assert "at S = 0.5 INFless as late as ElasticFlow (30.0 ± 0.0 points apart)" in not_seen
    assert said(but(0, HEAVY[-1])).startswith("on 96 GPUs 0.5 ±")

    def as_in_the_paper(group: Group, system: System) -> int:
        if group in (of_bank(2000), HEAVY[-1]) and system != CHOSEN[Reading.HOLD]:
            return 25
        if group == HEAVY[-1]:
            return 90
        return as_hoped(group, NOBODY if system == NOBODY else CHOSEN[Reading.RESIZES])

    paper_like = said(made(as_in_the_paper))
    assert "Not seen, where the paper has it: with 2,000" in paper_like, "it costs the same here"
    assert "points apart" not in paper_like
    assert "a greater distance" not in paper_like


def test_a_bar_is_judged_by_its_interval_not_its_mean() -> None:
    def bar(mean: float, half: float, **more: bool) -> Bar:
        return Bar("x", 10.0, (MeanEstimate(mean, half, 3),), **more)

    assert [bar(12.0, 1.0).verdict, bar(12.0, 3.0).verdict, bar(9.0, 3.0).verdict] == ["yes", "by the mean", "**no**"]
    assert [bar(8.0, 1.0, below=True).verdict, bar(8.0, 3.0, below=True).verdict] == ["yes", "by the mean"]


def test_a_case_worse_than_a_baseline_by_its_interval_is_named() -> None:
    one = evaluations(but(40, at("low", 0.5), NOBODY))[0]
    assert report_bars.worse_than(one, CHOSEN) == ["low, S = 0.5 (INFless, instances hold and wait)"]


def test_who_learns_is_told_apart() -> None:
    def learning_helps(group: Group, system: System) -> int:
        return as_hoped(group, system) - 4 * (dict(system.settings).get("learn") is True)

    of = made(learning_helps)
    what = "points that fewer jobs are late than under INFless, all at once, medium load"
    means = {}
    for condition in Condition:
        found = report_bars.against_baselines(evaluations(of)[:1], CHOSEN, condition)
        means[condition] = next(bar.found[0].mean for bar in found if bar.what == what)
    assert means == {Condition.NOBODY: 18.0, Condition.ALL: 18.0, Condition.OURS_ALONE: 22.0}


def test_a_fixed_cluster_is_paid_for_whole() -> None:
    one = evaluations(made())[0]
    price = one.parameters.device_price_s
    assert one.costs(MEDIUM, CHOSEN[Reading.RESIZES]) == [pytest.approx(38_400.0 * price)] * 3
    assert one.costs(MEDIUM, NOBODY) == [pytest.approx(1000.0 * price)] * 3


@pytest.mark.long
def test_the_page_sets_paper_and_ours_side_by_side(tmp_path: Path) -> None:
    of = made()
    page = report.write(of)
    assert "| 7a: points under INFless, instances hold and wait, medium | 15 to 25 | 18.0 ± 0.0 |" in page
    assert "| llama-30b | paper: % / $ | 28.4 / 38.8 | 38.9 / 46.4 | 82.3 / 69.4 |" in page
    assert "| without DelaySchedulable | +3.2 | +8.0 ± 0.0 | yes | +8.0 to +8.0; 2 of 2 | 1.16 |" in page
    assert "ours has 13.0 ± 2.5 %" in " ".join(page.split())
    assert (
        "| INFless, all at once | infless, order = arrival, window_s = 0.0, bank budget | 20.0 | 30.0 | yes |" in page
    )
    for path in drawing.draw(tmp_path, of):
        assert f"]({path.name})" in page
        assert path.stat().st_size > 1000


def test_a_record_is_read_as_it_was_kept(tmp_path: Path) -> None:
    of = made()
    keep(tmp_path / "record.json", of)
    assert read(tmp_path / "record.json") == of


class Again:
    """A record that lacks INFless's new measures, and a folder to repeat its runs with these settings."""

    def __init__(self, folder: Path, chosen: Mapping[Reading, System]) -> None:
        of, alone = made(), {group.name for group in VICUNA}
        kept = [msgspec.structs.replace(run, start_share=None) for run in of.runs if run.group not in alone]
        self.old, self.names = msgspec.structs.replace(of, runs=tuple(kept)), set[object]()
        self._runs = Runs(folder, jobs=1)
        for case in searching.cases(SETS[0].parameters(GRID)):
            self._runs.keep(case, result(late=20 if case.system in chosen.values() else 30))
        for number, choice in enumerate(SETS):
            parameters = choice.parameters(GRID)
            for group, system in everything.others(chosen) if number else everything.central(chosen):
                seeds = SEEDS[:2] if group == HEAVY[-1] else FEW if number else SEEDS
                for case in group.cases(system, parameters, seeds=seeds) if system.policy == INFLESS else ():
                    found = result(late=30 + case.seed - 11, held_s=1500.0 + case.seed)
                    share = 0.25 if group == MEDIUM else 0.05
                    self._runs.keep(case, msgspec.structs.replace(found, start_share=share, start_most=0.4))
                    self.names.add((choice.places, group.name, str(case.system), case.seed))

    def do(self, record: Record | None = None) -> Record:
        old, tell = record or self.old, lambda _: lambda *_: None
        return everything.again(self._runs, GRID, old, baseline=INFLESS, tell=tell, command="the command")


@pytest.mark.long
def test_a_baselines_runs_are_done_again_for_what_a_record_lacks(tmp_path: Path) -> None:
    again = Again(tmp_path, CHOSEN)
    new = again.do()
    assert new.chosen == CHOSEN
    assert {run.name for run in new.runs if run.system.startswith(INFLESS)} == again.names
    assert {run.name for run in again.old.runs} <= {run.name for run in new.runs}
    assert len(new.runs) == len({run.name for run in new.runs})
    assert {run.name for run in new.runs if run.start_share is not None} == again.names
    page = " ".join(report.write(new).split())
    judged = "25.0 to 25.0 | over; the mean is over it in 2 of 2 sets |"
    for reading in (Reading.HOLD, Reading.AT_ONCE):
        what = f"{reading.value}: waiting while instances start, % of a job's latency (3b)"
        assert f"| {what} | 11, at most 50 | 25.0 ± 0.0, at most 40 | {judged}" in page
        assert f"| {reading.value} | 19 others, which the record has | 30.0 to 30.0 | | |" in page
    assert "| the same, Vicuna-7B's jobs alone | 11, at most 50 | 5.0 ± 0.0, at most 40 | | under |" in page
    assert "done again by `the command`" in page
    assert "instances start during 25.0 ± 0.0 % of a job's latency" in page
    assert "(3b)" not in report.write(again.old)
    others = tuple(msgspec.structs.replace(run, paid_s=run.paid_s + 1) for run in again.old.runs)
    with pytest.raises(SimulationError, match="had come to"):
        again.do(msgspec.structs.replace(again.old, runs=others))


@pytest.mark.long
def test_a_baseline_is_run_with_its_new_best_setting(tmp_path: Path) -> None:
    better = {**CHOSEN, Reading.HOLD: searching.candidates(Reading.HOLD)[3]}
    again = Again(tmp_path, better)
    new = again.do()
    assert new.chosen == better
    assert {run.name for run in new.runs if run.system.startswith(INFLESS)} == again.names
    assert str(CHOSEN[Reading.HOLD]) not in {run.system for run in new.runs if run.group == MEDIUM.name}
    assert f"| {better[Reading.HOLD]} | 20.0 |" in report.write(new)
    slower = {**again.old.chosen, Reading.RESIZES: searching.candidates(Reading.RESIZES)[1]}
    with pytest.raises(SimulationError, match="ElasticFlow, resizes: another setting is the best one now"):
        again.do(msgspec.structs.replace(again.old, chosen=slower))


def test_infless_is_set_beside_ours_at_the_same_cost() -> None:
    hold = CHOSEN[Reading.HOLD]
    short, long = scenarios.kept(hold)
    came_to = {
        str(scenarios.of_window(15.0, usual_s=paper.WINDOW_S)): (20.0, 100.0), str(NOBODY): (10.0, 200.0),
        str(scenarios.of_window(240.0, usual_s=paper.WINDOW_S)): (6.0, 400.0), str(short): (25.0, 150.0),
        str(hold): (13.0, 300.0), str(long): (5.0, 500.0),
    }  # fmt: skip
    of = made()
    runs = [
        msgspec.structs.replace(run, violations=came_to[run.system][0], paid_s=came_to[run.system][1])
        if run.group == MEDIUM.name and run.system in came_to
        else run
        for run in of.runs
    ]
    page = Page(msgspec.structs.replace(of, runs=tuple(runs)))
    one, two, none = (apart_at_the_same_cost(page, system) for system in (short, hold, long))
    assert one is not None
    assert two is not None
    assert (one.mean, one.half_width) == (pytest.approx(25.0 - 15.0), pytest.approx(0.0))
    assert two.mean == pytest.approx(13.0 - 8.0)
    assert none is None
    name = "INFless, instances hold and wait"
    assert f"+10.0 ± 0.0 ({name}; 15); +5.0 ± 0.0 ({name}; by its " in " ".join(report_sets.short(page).split())
    assert f"| {name} | 120 | 5.0 ± 0.0 |" in report_sets.kept(page)


def test_sets_that_miss_their_anchors_on_other_seeds_are_counted() -> None:
    of = made()
    said = GRID.anchors.said()
    within = of.searched.within

    def come_to(central: float, other: float) -> Page:
        """Return a page whose runs meet the paper's late jobs and exceed its allocation by these shares."""
        runs = [
            msgspec.structs.replace(
                run,
                violations=said[0] if run.system == str(NOBODY) else run.violations,
                allocated=said[1] / 100.0 * (1.0 + (central if run.places == SETS[0].places else other)),
            )
            for run in of.runs
        ]
        return Page(msgspec.structs.replace(of, runs=tuple(runs)))

    assert [one.choice for one in still_within(come_to(within, within + 0.01))] == [SETS[0]]
    assert [one.choice for one in still_within(come_to(-within - 0.01, within))] == [SETS[1]]
    page = come_to(within + 0.01, within)
    text = " ".join(f"{short(page)} {sets_that_count(page)}".split())
    assert "1 of these 2 are still within it; the most central one, which every figure is of, is not one" in text
    assert "1 of the 2 sets are within" in text
    assert "and the most central one is not among them" in text


def test_of_settings_that_are_alike_the_cheapest_is_taken() -> None:
    def search(window_s: float, violations: float, cost: float) -> Search:
        return Search(Reading.HOLD, System(INFLESS, (("window_s", window_s),)), violations, cost)

    cheap = search(1.0, 20.4, 25.0)
    found = searching.best([search(0.0, 20.0, 30.0), cheap, search(2.0, 21.0, 5.0)])
    assert found == {Reading.HOLD: cheap.system}


def test_settings_are_chosen_on_seeds_of_their_own() -> None:
    tried = {case.seed for case in searching.cases(SETS[0].parameters(GRID))}
    assert tried == set(TUNING_SEEDS)
    reported = set(GRID.report.seeds)
    assert not tried & reported
    assert not {seed for stage in GRID.stages for seed in stage.seeds} & reported


def test_everything_is_run_once_and_the_paper_is_covered() -> None:
    wanted = set(everything.central(CHOSEN))
    assert wanted >= {(group, NOBODY) for group in (*MAIN, *HEAVY)}
    assert wanted >= {(MEDIUM, CHOSEN[reading]) for reading in Reading}
    assert set(everything.others(CHOSEN)) <= wanted
    assert everything.whole(GRID) == RunSelection(GRID.report.seeds, GRID.report.seeds[:5], GRID.report.seeds[:3])


@pytest.mark.long
def test_an_evaluation_with_kept_runs_is_written_without_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, parameters = Runs(tmp_path / "runs", jobs=1), every_choice(GRID)[0].parameters(GRID)
    for case in searching.cases(parameters, seeds=LOOK.tuning, smaller=LOOK.smaller):
        runs.keep(case, kept(case))
    for group, system in everything.central(CHOSEN):
        for case in group.cases(system, parameters, seeds=LOOK.seeds, smaller=LOOK.smaller):
            runs.keep(case, kept(case))
    before = set((tmp_path / "runs").iterdir())
    assert main(["--quick", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "new")]) == 0
    assert set((tmp_path / "runs").iterdir()) == before
    page = (tmp_path / "new" / PAGE).read_text()
    assert page.startswith(report.PAGE.read_text().partition("{made}")[0])
    for word in page.split("](")[1:]:
        assert (tmp_path / "new" / word.split(")")[0]).is_file()
    assert capsys.readouterr().out.strip().endswith(PAGE)
    assert main(["--page-only", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / PAGE).read_text() == page


def kept(case: Case) -> Result:
    return result(late=as_hoped(MEDIUM, case.system) + case.seed)


def test_the_page_in_the_docs_is_what_its_record_says() -> None:
    page = (FOLDER / PAGE).read_text()
    assert page == report.write(read(FOLDER / report.RECORD))
    for word in page.split("](")[1:]:
        assert (FOLDER / word.split(")")[0]).stat().st_size < 500_000
