"""`stoker batch` on a real session, killed and interrupted, answers each `custom_id` once. The small model has random
weights; its answers are deterministic.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from session_that_is_up import SessionUp
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="needs torch and transformers",
    ),
]
BATCH = [sys.executable, "-m", "stoker.manager.cli.main", "batch"]
HELD_RUN = [sys.executable, str(Path(__file__).parents[1] / "held_run.py")]
HELD_AT = 5
LIMIT_S = 150
REQUESTS = 60


def request(number, **body):
    url, words = "/v1/completions", {"prompt": f"Number {number} is"}
    if number % 2:
        url, words = "/v1/chat/completions", {"messages": [{"role": "user", "content": f"What is {number}?"}]}
    options = {"max_tokens": 8 + number % 40, "temperature": 0.7 * (number % 3)}
    return {
        "custom_id": f"r{number}", "method": "POST", "url": url, "body": {"model": "m", **words, **options, **body},
    }  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "tiny")
    return folder


def write_lines(path, values):
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in values))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(folder, *arguments, code=0):
    done = subprocess.run(
        [*BATCH, *arguments], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def choices(line):
    body = line["response"]["body"]
    return [choice.get("text") or choice.get("message") for choice in body["choices"]], body["usage"]


def pilots_below(folder):
    """The processes of pilots whose session lies in this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "stoker.pilot.main" in words and any(word.startswith(str(folder)) for word in words):
                found.append(process)
    return found


class Running:
    """A batch at work. It writes `HELD_AT` answers and waits; the end of the block stops it."""

    def __init__(self, folder, *arguments):
        self.part = folder / "run" / "results.jsonl.part"
        self.before = self.kept
        self.process = subprocess.Popen(
            [*HELD_RUN, str(HELD_AT), "batch", *arguments, "--out", "run"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    @property
    def kept(self):
        return self.part.read_bytes().count(b"\n") if self.part.exists() else 0

    def wait_until_held(self):
        deadline = time.monotonic() + LIMIT_S
        while self.kept < self.before + HELD_AT:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "no answers came"
            time.sleep(0.02)

    def end(self):
        out, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """A session that batches join which are to find the model hot."""
    with SessionUp(tmp_path_factory.mktemp("up")) as session:
        yield session


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models, up):
    """The answers of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write_lines(folder / "r.jsonl", map(request, range(REQUESTS)))
    out = batch(folder, "r.jsonl", "--model", str(models / "tiny"), "--out", "run", *up.joined)
    assert "60 requests · 30 of /v1/completions, 30 of /v1/chat/completions" in out
    assert not read_lines(folder / "run" / "errors.jsonl")
    return read_lines(folder / "run" / "responses.jsonl")


@pytest.mark.long
def test_a_batch_killed_and_interrupted_answers_each_request_once(tmp_path, models, whole, up):
    write_lines(tmp_path / "r.jsonl", map(request, range(REQUESTS)))
    arguments = ["r.jsonl", "--model", str(models / "tiny")]
    with Running(tmp_path, *arguments) as running:
        running.wait_until_held()
        running.process.kill()
        running.end()
        kept = running.kept
        # A torn line, as a crashed host or a full disk leaves it, is cut off; its request is answered again.
        with running.part.open("ab") as file:
            file.write(b'{"custom_id":"r5')
    with Running(tmp_path, *arguments) as running:
        running.wait_until_held()
        running.process.send_signal(signal.SIGINT)
        code, out = running.end()
    assert code == 130
    assert f"going on with run: {kept} of 60 are there" in out
    assert "of 60 answers are kept in run" in out
    command = f"stoker batch r.jsonl --model {models / 'tiny'} --out run"
    assert f"to continue, the same command:  {command}" in out
    assert not (tmp_path / "run" / "responses.jsonl").exists(), "a file that is not whole"

    summary = json.loads(batch(tmp_path, *arguments, "--out", "run", "--json", *up.joined))
    made = read_lines(tmp_path / "run" / "responses.jsonl")
    assert [line["custom_id"] for line in made] == [f"r{number}" for number in range(REQUESTS)]
    assert [choices(line) for line in made] == [choices(line) for line in whole]
    assert (summary["answered"], summary["errors"]) == (REQUESTS, 0)
    assert summary["attempt"]["kept"] + summary["attempt"]["requests"] == REQUESTS
    assert summary["completion_tokens"] == sum(choices(line)[1]["completion_tokens"] for line in made)
    assert not list((tmp_path / "run").glob("*.part"))


@pytest.mark.long
def test_a_batch_whose_pilot_is_killed_answers_each_request_once(tmp_path, models, whole):
    write_lines(tmp_path / "r.jsonl", map(request, range(REQUESTS)))
    with Running(tmp_path, "r.jsonl", "--model", str(models / "tiny")) as running:
        running.wait_until_held()
        pilots = pilots_below(tmp_path)
        assert pilots
        for pilot in pilots:
            pilot.kill()
        (tmp_path / "go-on").touch()
        code, out = running.end()
    assert code == 0, out
    made = read_lines(tmp_path / "run" / "responses.jsonl")
    assert [choices(line) for line in made] == [choices(line) for line in whole]
    assert collections.Counter(line["custom_id"] for line in made).most_common(1)[0][1] == 1


def test_unanswered_requests_are_in_the_errors_and_no_other_is_lost(tmp_path, models, up):
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
    shutil.copytree(models / "tiny", tmp_path / "second")
    arguments = ["r.jsonl", "--model", f"m={models / 'tiny'}", "--model", "other=second"]
    out = batch(tmp_path, *arguments, "--check", code=1)
    assert "4 lines cannot be answered, and the others can" in out
    assert not (tmp_path / "runs").exists(), "a check runs nothing"

    out = batch(tmp_path, *arguments, "--out", "run", *up.joined, code=1)
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

    # Nothing is left to do: the same command begins another run only with --fresh.
    done = subprocess.run([*BATCH, *arguments, "--out", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "this run is finished, its results are in run/responses.jsonl" in done.stderr


@pytest.mark.long
def test_one_model_answers_and_embeds(tmp_path, models, up):
    lines = [
        request(0, temperature=0),
        {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": ["one", "two"]}},
        {
            "custom_id": "p", "method": "POST", "url": "/v1/embeddings",
            "body": {"model": "m", "input": "two", "encoding_format": "base64"},
        },
        {"custom_id": "long", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x" * 2100}},
    ]  # fmt: skip
    write_lines(tmp_path / "r.jsonl", lines)
    batch(tmp_path, "r.jsonl", "--model", str(models / "tiny"), "--out", "run", *up.joined, code=1)
    text, plain, packed = (line["response"]["body"] for line in read_lines(tmp_path / "run" / "responses.jsonl"))
    assert text["object"] == "text_completion"
    assert plain["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    vectors = [each["embedding"] for each in plain["data"]]
    assert [sum(number**2 for number in vector) for vector in vectors] == [pytest.approx(1), pytest.approx(1)]
    given = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(given) // 4}f", given) == pytest.approx(vectors[1], abs=1e-6)
    (refused,) = read_lines(tmp_path / "run" / "errors.jsonl")
    error = refused["response"]["body"]["error"]
    assert (refused["custom_id"], error["code"], error["param"]) == ("long", "context_length_exceeded", "input")


@pytest.mark.long
def test_a_batch_joins_a_session_that_is_up_and_leaves_it_up(tmp_path, models, up):
    write_lines(tmp_path / "r.jsonl", [request(0), request(1)])
    arguments = ["r.jsonl", "--model", str(models / "tiny"), "--out", "run"]
    assert f"session {up.name}" in batch(tmp_path, *arguments, *up.joined)
    assert len(read_lines(tmp_path / "run" / "responses.jsonl")) == 2
    assert f"session {up.name} · up" in up.stoker("status", up.name)


def test_likelihoods_come_in_the_form_of_each_endpoint(tmp_path, models, up):
    chat = request(1, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    lines = [
        chat, request(2, max_tokens=4, temperature=0, logprobs=2), request(4, max_tokens=4, logprobs=0),
        {**chat, "custom_id": "json", "body": {**chat["body"], "response_format": schema}},
    ]  # fmt: skip
    write_lines(tmp_path / "r.jsonl", lines)
    arguments = ["r.jsonl", "--model", str(models / "tiny"), "--engine", "continuous", "--out", "run"]
    batch(tmp_path, *arguments, *up.joined, code=1)
    first, second, third = (
        line["response"]["body"]["choices"][0]["logprobs"] for line in read_lines(tmp_path / "run" / "responses.jsonl")
    )
    assert len(first["content"]) == len(second["tokens"]) == len(third["tokens"]) == 4
    for place in first["content"]:
        assert place["logprob"] == pytest.approx(place["top_logprobs"][0]["logprob"])  # the likeliest was taken
        assert len(place["top_logprobs"]) == 2
        assert bytes(place["bytes"]).decode(errors="replace") == place["token"]
    assert max(second["token_logprobs"]) <= 0
    assert [len(each) for each in third["top_logprobs"]] == [0] * 4
    assert second["text_offset"][0] == 0
    (refused,) = read_lines(tmp_path / "run" / "errors.jsonl")
    assert refused["custom_id"] == "json"
    assert "schema" in refused["response"]["body"]["error"]["message"]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="to mount a small disk needs root")
def test_a_disk_that_is_full_costs_no_answer_that_is_there(tmp_path, models, up):
    """The run folder's disk has room for some answers; the same command continues once there is more room."""
    write_lines(tmp_path / "r.jsonl", (request(number, max_tokens=200) for number in range(REQUESTS)))
    (tmp_path / "small").mkdir()
    command = " ".join([*BATCH, "r.jsonl", "--model", str(models / "tiny"), "--out", "small/run", *up.joined])
    script = f"""
        mount -t tmpfs -o size=24k none small || exit 77
        {command}; echo "exit $?"
        wc -l < small/run/results.jsonl.part
        mount -o remount,size=10m small
        {command}; echo "exit $?"
        cp small/run/*.jsonl .
    """
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("no file system can be mounted here")
    said = done.stdout + done.stderr
    assert "exit 1" in said, said
    assert "cannot be written: No space left on device" in said
    assert "once the cause is fixed, the same command:  stoker batch r.jsonl" in said
    assert "exit 0" in said, said
    made = read_lines(tmp_path / "responses.jsonl")
    assert [line["custom_id"] for line in made] == [f"r{number}" for number in range(REQUESTS)]
