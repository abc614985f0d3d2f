from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import Verdict
from benchmarks.tuning.prompt_quality import table_of
from benchmarks.tuning.prompt_quality_side import run, target, task_summary


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


def test_task_summary_counts_iterations_to_the_target_loss() -> None:
    assert target(records()[1:3]) == 3.0  # the mean of the lowest loss of each curve
    found = task_summary(records(), most=9)
    assert found is not None
    assert found["by_score"] == 6
    assert found["best"] == 3
    assert found["listed"] == ["6", "3"]
    assert found["randoms"] == [6, 9]
    assert found["induced"] == [9]
    assert found["by_score_between"] == pytest.approx(4.5)
    assert found["reached"] is True


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(before)


@pytest.mark.long
def test_interrupted_evaluation_resumes_with_the_same_results(tmp_path: Path, one_thread: None) -> None:
    first = run(quick=True, folder=str(tmp_path))
    (log,) = tmp_path.glob("curves-*.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    parts = [json.loads(line)["part"] for line in lines]
    listed = ["listed"] * 3
    whole = ["spread"] * 4
    assert parts == ["lookup", "random", "random", *listed, "random, on", "induction", "induced", *whole]
    log.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # the process was killed in the middle of a record
    assert run(quick=True, report=True, folder=str(tmp_path))["tasks"] == {}
    again = run(quick=True, folder=str(tmp_path))
    assert again["tasks"] == first["tasks"]
    assert again["spread"] == first["spread"]
    assert len(again["spread"]["letters"]["iterations"]) == 4
    assert again["tasks"]["letters"]["by_score"] >= again["tasks"]["letters"]["best"] >= 1
    assert log.read_bytes().startswith(b"".join(lines[:3]))
    assert log.read_bytes().count(b"\n") == len(lines)
    assert run(quick=True, report=True, folder=str(tmp_path))["tasks"] == first["tasks"]
    assert {line.verdict(quick=True) for line in table_of(again).lines} == {Verdict.NOT_JUDGED, Verdict.NO_BAR}
