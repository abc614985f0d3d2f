from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import Verdict
from benchmarks.tuning.prompt_quality import interval, table_of
from benchmarks.tuning.prompt_quality_side import (
    CHOSEN,
    Settings,
    crossing,
    iterations_to,
    options,
    run,
    spread_of,
    target,
    task_summary,
)
from benchmarks.tuning.prompt_tasks import TASKS

CURVE = [(0, 5.0), (3, 3.0), (6, 2.0), (9, 1.0)]


@pytest.mark.parametrize(
    ("reach", "counted", "between"), [(6.0, 1, 1.0), (3.0, 3, 3.0), (2.5, 6, 4.5), (1.0, 9, 9.0), (0.5, 15, 15.0)]
)
def test_iterations_to_accuracy_are_counted(reach: float, counted: int, between: float) -> None:
    assert iterations_to(CURVE, reach, most=15) == counted
    assert crossing(CURVE, reach, most=15) == pytest.approx(between)


def record(part: str, prompt: str, *losses: float) -> dict[str, Any]:
    points = [(3 * place, loss) for place, loss in enumerate(losses)]
    return {"task": "one", "part": part, "prompt": prompt, "points": points}


def records() -> list[dict[str, Any]]:
    return [
        {"task": "one", "part": "lookup", "prompt": "", "best": ["b", "a"], "scores": 7},
        record("random", "r", 6.0, 5.0, 2.0, 3.0),
        record("random", "q", 7.0, 6.0, 5.0, 4.0),
        record("listed", "a", 5.0, 3.0),
        record("listed", "b", 4.0, 3.5, 2.5),
        record("induced", "i", 6.0, 5.0, 4.0, 3.1),
    ]


def test_results_of_a_task_depend_on_target_and_score_order() -> None:
    assert target(records()[1:3]) == 3.0  # the best loss of each curve, not the last
    found = task_summary(records(), most=9)
    assert found is not None
    assert found["by_score"] == 6
    assert found["best"] == 3
    assert found["listed"] == ["6", "3"]
    assert found["randoms"] == [6, 9]
    assert found["induced"] == [9]
    assert found["by_score_between"] == pytest.approx(4.5)
    assert found["reached"] is True


def test_longer_tuning_counts_whole_and_missing_tuning_is_pending() -> None:
    assert task_summary(records(), most=12) is None, "a random prompt has neither reached the target nor tried for long"
    went_on = record("random, on", "q", 7.0, 6.0, 5.0, 4.0, 2.9)
    found = task_summary([*records(), went_on], most=12)
    assert found is not None
    assert found["reach"] == 3.0, "what comes later makes no other target"
    assert found["randoms"] == [6, 12]
    assert task_summary([one for one in [*records(), went_on] if one["prompt"] != "b"], most=12) is None


@pytest.mark.parametrize("missing", ["lookup", "random", "listed", "a"])
def test_task_without_records_or_short_list_is_not_counted(missing: str) -> None:
    assert task_summary([one for one in records() if missing not in (one["part"], one["prompt"])], most=9) is None


def test_spread_of_random_prompts_has_its_own_target() -> None:
    settings = Settings(target_iterations=6, iterations=12)
    assert spread_of(records(), settings) is None
    some = [
        record("spread", "a", 6.0, 4.0, 3.0, 2.5, 1.0),
        record("spread", "b", 9.0, 8.0, 7.0, 6.0, 4.5),
        record("spread", "c", 9.0, 9.0, 8.0, 7.0, 6.5),
    ]
    spread = spread_of([*records(), *some], settings)
    assert spread == {"reach": 6.0, "iterations": [1, 9, 12], "between": [1.0, 9.0, 12.0], "never": 1}
    told = table_of({**found([6] * 10, [6] * 10, [[8]] * 10), "spread": {"one": spread}}).notes
    (line,) = [note for note in told if "random prompts to 6.000" in note]
    assert "1 to 12 iterations, median 9: median and most are 9.0 and 12.0 times the least; between" in line
    assert "1 never reach it" in line


def test_task_without_induced_tuning_counts_for_the_other_bars() -> None:
    whole = task_summary(records(), most=9)
    part = task_summary(records()[:-1], most=9)
    assert whole is not None
    assert part == {**whole, "induced": [], "induced_between": []}
    table = table_of({"machine": "here", "settings": {"iterations": 9}, "tasks": {"one": part}, "spent_s": 1.0})
    assert not [line for line in table.lines if "induced" in line.what]


def found(by_score: list[int], best: list[int], randoms: list[list[int]]) -> dict[str, Any]:
    tasks = {}
    for number, (ours, least, drawn) in enumerate(zip(by_score, best, randoms, strict=True)):
        one = {"by_score": ours, "best": least, "randoms": drawn, "induced": [ours]}
        between = {f"{name}_between": value for name, value in one.items()}
        tasks[f"task {number}"] = {**one, **between, "listed": [str(ours)], "reach": 1.0, "reached": True, "scores": 9}
    return {"machine": "here", "settings": {"iterations": 15}, "tasks": tasks, "spent_s": 1.0}


@pytest.mark.parametrize(
    ("best", "drawn", "verdicts"),
    [(6, [8, 8, 15], [Verdict.MET, Verdict.MET]), (5, [3, 7, 15], [Verdict.MISSED, Verdict.MISSED])],
)
def test_bars_use_the_median_task(best: int, drawn: list[int], verdicts: list[Verdict]) -> None:
    table = table_of(found([6] * 10, [best] * 6 + [1] * 2 + [6] * 2, [drawn] * 10))
    assert [line.verdict() for line in table.lines if line.bar is not None] == verdicts


def test_fewer_than_ten_tasks_meet_no_bar() -> None:
    table = table_of(found([3] * 9, [3] * 9, [[15]] * 9))
    assert {line.verdict() for line in table.lines if line.bar is not None} == {Verdict.TOO_FEW}


def test_interval_contains_the_median_and_is_reproducible() -> None:
    numbers = [0.3, 0.5, 0.8, 0.9, 1.0, 1.0, 1.0, 0.7, 0.6, 0.4]
    low, high = interval(numbers, draws=500)
    assert min(numbers) <= low < statistics.median(numbers) < high <= max(numbers)
    assert interval(numbers, draws=500) == (low, high)
    assert interval([0.5] * 4, draws=50) == (0.5, 0.5)


def test_evaluation_has_ten_tasks() -> None:
    assert len(set(CHOSEN)) == 10
    assert set(CHOSEN) <= set(TASKS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(before)


@pytest.mark.long
def test_evaluation_runs_on_a_tiny_model_and_resumes(tmp_path: Path, one_thread: None) -> None:
    asked = ("--quick", "--folder", str(tmp_path))
    first = run(options(asked))
    (log,) = tmp_path.glob("curves-*.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    parts = [json.loads(line)["part"] for line in lines]
    listed = ["listed"] * 3
    whole = ["spread"] * 4
    assert parts == ["lookup", "random", "random", *listed, "random, on", "induction", "induced", *whole]
    log.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed in the middle of a record
    assert run(options((*asked, "--report")))["tasks"] == {}
    again = run(options(asked))
    assert again["tasks"] == first["tasks"]
    assert again["spread"] == first["spread"]
    assert len(again["spread"]["letters"]["iterations"]) == 4
    assert again["tasks"]["letters"]["by_score"] >= again["tasks"]["letters"]["best"] >= 1
    assert log.read_bytes().startswith(b"".join(lines[:3]))
    assert log.read_bytes().count(b"\n") == len(lines)
    assert run(options((*asked, "--report")))["tasks"] == first["tasks"]
    assert {line.verdict(quick=True) for line in table_of(again).lines} == {Verdict.NOT_JUDGED, Verdict.NO_BAR}
