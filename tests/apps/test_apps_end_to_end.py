"""Applications and `stoker batch` in real sessions give the same results after kills, interruptions and resumption. The
small model has random weights; `make run` and the docs tests use the shipped model.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from cli.command_line import Stoker
from session_that_is_up import SessionUp
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="needs torch and transformers",
    ),
]
HELD_RUN = [sys.executable, str(Path(__file__).parents[1] / "held_run.py")]
HELD_AT = 5
LIMIT_S = 180
REQUESTS = 60


def stoker(folder, *arguments, code=0):
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SESSION", "")  # `run --session` changes this variable; the patch restores the old value
        done = Stoker()(*arguments)
    assert done.exit_code == code, f"{done.output}{done.exception}"
    return done.stdout


def write_lines(path, values):
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in values))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class HeldRun:
    """A run that pauses after it has written `more` results. Leaving the block kills the run."""

    def __init__(self, folder, *arguments, out="run", more=HELD_AT):
        self.part = folder / out / "results.jsonl.part"
        self._until = self.kept + more
        self.process = subprocess.Popen(
            [*HELD_RUN, str(more), *arguments, "--out", out],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def __enter__(self):
        deadline = time.monotonic() + LIMIT_S
        while self.kept < self._until:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the run gave no results"
            time.sleep(0.02)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    @property
    def kept(self):
        return self.part.read_bytes().count(b"\n") if self.part.exists() else 0

    def end(self, number=0):
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(model)
    return str(model)


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """A session that keeps models loaded between runs."""
    with SessionUp(tmp_path_factory.mktemp("up")) as session:
        yield session


# ---- applications


@pytest.mark.long
def test_sweep_runs_two_contexts_side_by_side(tmp_path, tiny):
    (tmp_path / "rows.csv").write_text("name,question\na,What is red?\nb,What is two plus two?\n")
    (tmp_path / "sweep.toml").write_text(
        f'data = "rows.csv"\nid = "name"\n[[models]]\nname = "one"\npath = "{tiny}"\n'
        f'[[models]]\nname = "two"\npath = "{tiny}"\ndtype = "float32"\n'
        '[[prompts]]\nname = "p"\ntext = "{question}"\n[parameters]\nmax_new_tokens = [2, 4]\n'
    )
    summary = json.loads(stoker(tmp_path, "run", "inference_sweep", "--sweep", "sweep.toml", "--json"))
    rows = pyarrow.parquet.read_table(tmp_path / summary["results"]).to_pylist()
    assert [(row["model"], row["max_new_tokens"], row["id"]) for row in rows] == [
        (model, tokens, name) for model in ("one", "two") for tokens in (2, 4) for name in ("a", "b")
    ]
    # Calls of the two models overlap on one device. The sum of their durations is therefore reported as time of calls;
    # no device time is reported.
    assert summary["attempt"]["infer_s"] == pytest.approx(sum(row["infer_s"] for row in rows), abs=1e-4)
    assert "infer_device_s" not in summary["attempt"]
    # The two libraries have equal weights and precision, so their greedy texts are equal. The longer text begins like
    # the shorter text.
    outputs = {(row["model"], row["max_new_tokens"], row["id"]): row["output"] for row in rows}
    for name in ("a", "b"):
        assert outputs["one", 4, name] == outputs["two", 4, name]
        assert outputs["one", 4, name].startswith(outputs["one", 2, name])
    assert os.listdir(tmp_path / "runs") == [os.path.basename(summary["run"])]


def test_sweep_continues_without_rows_that_its_model_refuses(tmp_path, tiny, up):
    rows = [{"id": str(number), "question": "What is red?"} for number in range(5)]
    rows[1]["question"], rows[3]["question"] = "", "red " * 9000
    write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "sweep.toml").write_text(
        f'data = "rows.jsonl"\nid = "id"\n[[models]]\nname = "one"\npath = "{tiny}"\n'
        '[[prompts]]\nname = "bare"\ntext = "{question}"\n[parameters]\nmax_new_tokens = 2\n'
    )

    options = ["--sweep", "sweep.toml", "--out", "run", "--format", "jsonl"]
    out = stoker(tmp_path, "run", "inference_sweep", *options, *up.joined, code=1)
    assert "failed: 2 of 5 inferences have no output; the column `error` says why" in out
    assert "rows.jsonl: line 2: row 1 with one, bare, max_new_tokens 2, temperature 0.0: the prompt is empty" in out
    assert out.splitlines()[-1] == "  try them again:  stoker run inference_sweep --resume run"
    made = read_lines(tmp_path / "run" / "results.jsonl")
    assert [row["id"] for row in made if row["output"] is None] == ["1", "3"]
    assert "tokens with its continuation; the model accepts at most" in made[3]["error"]
    assert [row["error"] for row in made if row["output"] is not None] == [""] * 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["errors"] == 2

    again = stoker(tmp_path, "run", "inference_sweep", "--resume", "run", *up.joined, code=1)
    assert "continuing run: 3 of 5 are kept" in again
    assert read_lines(tmp_path / "run" / "results.jsonl")[0] == made[0]


# ---- stoker batch


def request(number, **body):
    url, words = "/v1/completions", {"prompt": f"Number {number} is"}
    if number % 2:
        url, words = "/v1/chat/completions", {"messages": [{"role": "user", "content": f"What is {number}?"}]}
    options = {"max_tokens": 8 + number % 40, "temperature": 0.7 * (number % 3)}
    return {
        "custom_id": f"r{number}", "method": "POST", "url": url, "body": {"model": "m", **words, **options, **body},
    }  # fmt: skip


def batch(folder, *arguments, code=0):
    return stoker(folder, "batch", "r.jsonl", *arguments, "--out", "run", code=code)


def choices(line):
    body = line["response"]["body"]
    return [choice.get("text") or choice.get("message") for choice in body["choices"]], body["usage"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny, up):
    """Return the answers of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    write_lines(folder / "r.jsonl", map(request, range(REQUESTS)))
    out = batch(folder, "--model", tiny, *up.joined)
    assert "60 requests · 30 of /v1/completions, 30 of /v1/chat/completions" in out
    assert not read_lines(folder / "run" / "errors.jsonl")
    return read_lines(folder / "run" / "responses.jsonl")


@pytest.mark.long
def test_batch_killed_and_interrupted_answers_each_request_once(tmp_path, tiny, whole, up):
    write_lines(tmp_path / "r.jsonl", map(request, range(REQUESTS)))
    command = ["batch", "r.jsonl", "--model", tiny]
    with HeldRun(tmp_path, *command) as held:
        held.end(signal.SIGKILL)
        kept = held.kept
        # A crashed host or a full disk leaves an incomplete last line. The next run removes this line and answers the
        # request of the line again.
        with held.part.open("ab") as file:
            file.write(b'{"custom_id":"r5')
    with HeldRun(tmp_path, *command) as held:
        code, out = held.end(signal.SIGINT)
    assert code == 130
    assert f"continuing run: {kept} of 60 are kept" in out
    assert "of 60 answers are kept in run" in out
    assert f"to continue, the same command:  stoker batch r.jsonl --model {tiny} --out run" in out
    assert not (tmp_path / "run" / "responses.jsonl").exists(), "an incomplete file"

    summary = json.loads(batch(tmp_path, "--model", tiny, "--json", *up.joined))
    made = read_lines(tmp_path / "run" / "responses.jsonl")
    assert [line["custom_id"] for line in made] == [f"r{number}" for number in range(REQUESTS)]
    assert [choices(line) for line in made] == [choices(line) for line in whole]
    assert (summary["answered"], summary["errors"]) == (REQUESTS, 0)
    assert summary["attempt"]["kept"] + summary["attempt"]["requests"] == REQUESTS
    assert summary["completion_tokens"] == sum(choices(line)[1]["completion_tokens"] for line in made)
    assert not list((tmp_path / "run").glob("*.part"))


def test_refused_requests_go_to_the_error_file_and_others_run(tmp_path, tiny, up):
    lines = [
        request(0, temperature=0),
        request(1, n=2),
        "{half",
        request(0),
        request(2, prompt="long " * 600, temperature=0),
        request(4, model="other", prompt=["one", "two"], temperature=0),
        request(6, model="nobody"),
    ]
    write_lines(tmp_path / "r.jsonl", lines)
    shutil.copytree(tiny, tmp_path / "second")
    models = ["--model", f"m={tiny}", "--model", "other=second"]
    out = batch(tmp_path, *models, "--check", code=1)
    assert "4 lines cannot be answered; the other lines run" in out
    assert not (tmp_path / "run").exists(), "a check runs nothing"

    out = batch(tmp_path, *models, *up.joined, code=1)
    answered = read_lines(tmp_path / "run" / "responses.jsonl")
    assert [(line["custom_id"], line["response"]["body"]["model"]) for line in answered] == [
        ("r0", "m"), ("r4", "other"),
    ]  # fmt: skip
    assert len(answered[1]["response"]["body"]["choices"]) == 2
    errors = read_lines(tmp_path / "run" / "errors.jsonl")
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [
        ("r1", 400), (None, 400), (None, 400), ("r2", 400), ("r6", 404),
    ]  # fmt: skip
    told = [line["response"]["body"]["error"] for line in errors]
    assert [error["code"] for error in told] == [
        "unsupported_value", "invalid_json_line", "duplicate_custom_id", "context_length_exceeded", "model_not_found",
    ]  # fmt: skip
    too_long = "line 5: this model's maximum context length is 2048 tokens, and the prompt has 3000"
    assert told[3]["message"].startswith(too_long)
    assert "no answer: 5 of 7 requests" in out
    assert "line 2: body.n is 2" in out
    ids = [line["id"] for line in [*answered, *errors]]
    assert len(set(ids)) == len(ids)

    # The run is complete, so the same command needs --fresh to run again.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        again = Stoker()("batch", "r.jsonl", *models, "--out", "run")
    assert "this run is finished, its results are in run/responses.jsonl" in str(again.exception)
