"""Applications on a real session, stopped, killed and resumed with the same end. The small model has random weights;
`make run` and the tests of the documents run the shipped one.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pyarrow.parquet
import pytest
from session_that_is_up import SessionUp
from tiny_model import write_tiny_model

from stoker.apps.fact_verification.options import SHIPPED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="needs torch and transformers",
    ),
]
STOKER = [sys.executable, "-m", "stoker.manager.cli.main", "run"]
HELD_RUN = [sys.executable, str(Path(__file__).parents[1] / "held_run.py")]
LIMIT_S = 180


def stoker(folder, *arguments):
    done = subprocess.run(
        [*STOKER, *arguments], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stop(folder, part, number, *arguments, more):
    """Starts a run and sends it the signal once `more` results than now are in its log, where it waits. Its exit code
    and output."""
    before = part.read_bytes().count(b"\n") if part.exists() else 0
    running = subprocess.Popen(
        [*HELD_RUN, str(more), "run", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT_S
    try:
        while not part.exists() or part.read_bytes().count(b"\n") < before + more:
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < deadline, "no results came"
            time.sleep(0.02)
        running.send_signal(number)
        out, _ = running.communicate(timeout=LIMIT_S)
    finally:
        running.kill()
        running.wait()
    return running.returncode, out


def results(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """A session that runs join which are to find the model hot."""
    with SessionUp(tmp_path_factory.mktemp("up")) as session:
        yield session


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """The command line that verifies seven claims."""
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(model)
    return ["fact_verification", "--limit", "7", "--format", "jsonl", "--model", str(model)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, facts, up):
    """The folder and output of an undisturbed run: the shipped prompts, one claim a call."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "run", stoker(folder, *facts, "--batch-size", "1", "--out", "run", *up.joined)


@pytest.mark.long
def test_a_run_killed_and_interrupted_ends_like_one_that_was_not(tmp_path, facts, whole, up):
    folder, out = whole
    assert "3 prompts x 7 claims = 21 inferences" in out
    assert "21 inferences in" in out
    expected = results(folder / "results.jsonl")
    assert len(expected) == 21
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["attempt"]["calls"] == 21
    assert summary["attempt"]["loads"] <= summary["attempt"]["devices"]
    timeline = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert sum(event["args"]["claims"] for event in timeline if event["ph"] == "X") == 21

    part = tmp_path / "broken" / "results.jsonl.part"
    options = [*facts, "--batch-size", "1", "--out", "broken"]
    code, _ = stop(tmp_path, part, signal.SIGKILL, *options, more=4)
    assert code == -signal.SIGKILL
    kept = part.read_bytes().count(b"\n")
    # A torn line, as a crashed host leaves it, is cut off; its result is made again.
    with part.open("ab") as file:
        file.write(b'{"prompt":"to')
    code, out = stop(tmp_path, part, signal.SIGINT, *options, more=4)
    assert f"going on with broken: {kept} of 21 are there" in out
    assert code == 130
    assert "results are kept in broken" in out
    assert "continue:  stoker run fact_verification --resume broken" in out
    assert not list((tmp_path / "broken").glob("results.jsonl")), "a half-written result file"

    out = stoker(tmp_path, "fact_verification", "--resume", "broken", *up.joined)
    assert "more were there from before" in out
    resumed = results(tmp_path / "broken" / "results.jsonl")
    assert not part.exists()
    for one, other in zip(expected, resumed, strict=True):
        for field in ("prompt", "claim_id", "label", "answer", "raw_answer", "correct"):
            assert one[field] == other[field]
        for field in ("score_supports", "score_refutes", "score_not_enough_info"):
            assert one[field] == pytest.approx(other[field], abs=1e-3)


@pytest.mark.long
def test_calls_of_any_size_and_without_context_give_the_same_answers(tmp_path, facts, whole, up):
    folder, _ = whole
    first = tomllib.loads(SHIPPED.read_text())["prompts"][0]
    (tmp_path / "first.jsonl").write_text(json.dumps(first))
    options = [*facts, "--prompts", "first.jsonl", "--batch-size", "4", "--awareness", "none", *up.joined]
    none = json.loads(stoker(tmp_path, *options, "--out", "none", "--json"))
    assert none["attempt"]["loads"] == none["attempt"]["calls"] == 2
    assert none["prompts"][0]["claims"] == 7
    answers = {row["claim_id"]: row["raw_answer"] for row in results(tmp_path / "none" / "results.jsonl")}
    by_one = [row for row in results(folder / "results.jsonl") if row["prompt"] == first["name"]]
    assert answers == {row["claim_id"]: row["raw_answer"] for row in by_one}
    assert len(answers) == 7


@pytest.mark.long
def test_a_sweep_of_two_contexts_side_by_side(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "rows.csv").write_text("name,question\na,What is red?\nb,What is two plus two?\n")
    (tmp_path / "sweep.toml").write_text(
        'data = "rows.csv"\nid = "name"\n[[models]]\nname = "one"\npath = "tiny"\n'
        '[[models]]\nname = "two"\npath = "tiny"\ndtype = "float32"\n'
        '[[prompts]]\nname = "p"\ntext = "{question}"\n[parameters]\nmax_new_tokens = [2, 4]\n'
    )
    summary = json.loads(stoker(tmp_path, "inference_sweep", "--sweep", "sweep.toml", "--json"))
    rows = pyarrow.parquet.read_table(tmp_path / summary["results"]).to_pylist()
    assert [(row["model"], row["max_new_tokens"], row["id"]) for row in rows] == [
        (model, tokens, name) for model in ("one", "two") for tokens in (2, 4) for name in ("a", "b")
    ]
    # Calls of two models on one device overlap: their time is called what it is, and no time of devices.
    assert summary["attempt"]["infer_s"] == pytest.approx(sum(row["infer_s"] for row in rows), abs=1e-4)
    assert "infer_device_s" not in summary["attempt"]
    # The same weights at one precision in two libraries: greedy texts agree, the longer begins as the shorter.
    outputs = {(row["model"], row["max_new_tokens"], row["id"]): row["output"] for row in rows}
    for name in ("a", "b"):
        assert outputs["one", 4, name] == outputs["two", 4, name]
        assert outputs["one", 4, name].startswith(outputs["one", 2, name])
    assert os.listdir(tmp_path / "runs") == [os.path.basename(summary["run"])]


@pytest.mark.long
def test_a_killed_sweep_has_each_row_once_and_in_order(tmp_path, up):
    write_tiny_model(tmp_path / "tiny")
    rows = [{"name": f"r{number}", "question": f"What is {number}?"} for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sweep.toml").write_text(
        'data = "rows.jsonl"\nid = "name"\n[[models]]\nname = "one"\npath = "tiny"\n'
        '[[prompts]]\nname = "p"\ntext = "{question}"\n[parameters]\nmax_new_tokens = [8, 16]\ntemperature = 0.7\n'
    )
    options = ["inference_sweep", "--sweep", "sweep.toml", "--batch-size", "2", "--format", "jsonl"]
    stoker(tmp_path, *options, "--out", "whole", *up.joined)
    part = tmp_path / "broken" / "results.jsonl.part"
    code, _ = stop(tmp_path, part, signal.SIGKILL, *options, "--out", "broken", more=20)
    assert code == -signal.SIGKILL
    kept = part.read_bytes().count(b"\n")
    code, out = stop(tmp_path, part, signal.SIGINT, *options, "--out", "broken", more=20)
    assert code == 130
    assert f"going on with broken: {kept} of 200 are there" in out
    stoker(tmp_path, "inference_sweep", "--resume", "broken", *up.joined)
    whole, broken = (results(tmp_path / folder / "results.jsonl") for folder in ("whole", "broken"))
    assert [(row["max_new_tokens"], row["id"]) for row in broken] == [
        (tokens, row["name"]) for tokens in (8, 16) for row in rows
    ]
    assert [row["output"] for row in broken] == [row["output"] for row in whole], "draws depend on the row alone"
    assert sorted(os.listdir(tmp_path / "broken")) == [".lock", "results.jsonl", "run.json", "summary.json"]


def test_a_sweep_goes_on_without_the_rows_that_its_model_cannot_take(tmp_path, up):
    write_tiny_model(tmp_path / "tiny")
    rows = [{"id": str(number), "question": "What is red?"} for number in range(5)]
    rows[1]["question"], rows[3]["question"] = "", "red " * 9000
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sweep.toml").write_text(
        'data = "rows.jsonl"\nid = "id"\n[[models]]\nname = "one"\npath = "tiny"\n'
        '[[prompts]]\nname = "bare"\ntext = "{question}"\n[parameters]\nmax_new_tokens = 2\n'
    )

    def sweep(*arguments):
        command = [*STOKER, "inference_sweep", *arguments, *up.joined]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout

    out = sweep("--sweep", "sweep.toml", "--out", "run", "--format", "jsonl")
    assert "failed: 2 of 5 results have no output; the column `error` says why" in out
    assert "rows.jsonl: line 2: row 1 with one, bare, max_new_tokens 2, temperature 0.0: the prompt is empty" in out
    assert out.splitlines()[-1] == "  try them again:  stoker run inference_sweep --resume run"
    made = results(tmp_path / "run" / "results.jsonl")
    assert [row["id"] for row in made if row["output"] is None] == ["1", "3"]
    assert "tokens with its continuation; the model reads" in made[3]["error"]
    assert [row["error"] for row in made if row["output"] is not None] == [""] * 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["errors"] == 2

    again = sweep("--resume", "run")
    assert "going on with run: 3 of 5 are there" in again
    assert results(tmp_path / "run" / "results.jsonl")[0] == made[0]
