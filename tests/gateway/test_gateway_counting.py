"""A running gateway counts the requests and tokens of its keys, and a killed one keeps its counts."""

from __future__ import annotations

import io
import json
import subprocess

import httpx
import openai
import pytest
from gateway.asking import CHAT, chat, client_of, is_refused
from gateway.running import LIMIT_S, MODELS, SERVE, keys, until

pytestmark = pytest.mark.slow
BRIEF = """
[models.brief]
path = "models/tiny"
max_model_len = 48
chat_template = "one two three {{ messages[0].content }}"
"""
BODY = {"model": "small", "messages": [{"role": "user", "content": "two plus two"}], "max_tokens": 200}


@pytest.fixture(scope="module")
def write_models():
    return lambda folder: (folder / "models.toml").write_text(MODELS + BRIEF)


@pytest.fixture
def key(world):
    """A function that makes keys; all keys are removed afterwards."""

    def make(name, *options):
        return keys("add", name, *options)

    yield make
    (world.home / "serve" / "keys.json").unlink(missing_ok=True)


def usage(*options: str) -> dict[tuple[str, str], dict]:
    """Return the rows that the command line shows by key and model."""
    done = subprocess.run(
        [*SERVE, "serve", "usage", "--json", *options], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return {(row["key"], row["model"]): row for row in json.loads(done.stdout)["usage"]}


def asked(gateway, own, **filters) -> httpx.Response:
    headers = {"authorization": f"Bearer {own}"}
    return httpx.get(f"{gateway.url}/v1/usage", params=filters, headers=headers, timeout=LIMIT_S)


def test_each_request_counts_for_its_key_with_its_tokens(gateway, key):
    admin, own = key("root", "--admin"), key("ana", "--concurrent", "1")
    with client_of(gateway, own) as ana:
        answers = [chat(ana).usage, chat(ana, n=2).usage]
        *_, last = chat(ana, stream=True, stream_options={"include_usage": True})
        answers.append(last.usage)
        left = chat(ana, stream=True, max_tokens=1500)
        taken = sum(bool(chunk.choices[0].delta.content) for chunk, _ in zip(left, range(20), strict=False))
        assert is_refused(ana, "concurrent_requests")
        left.close()
        until(lambda: not is_refused(ana, "concurrent_requests"), why="the place of the stream is free")
        with pytest.raises(openai.InternalServerError, match="model gone cannot be used"):
            chat(ana, model="gone")
        with pytest.raises(openai.NotFoundError):
            chat(ana, model="unknown")
        vectors = ana.embeddings.create(model="vectors", input=["one", "two"]).usage
    rows = {(row["key"], row["model"]): row for row in asked(gateway, admin).json()["data"]}
    small = rows["ana", "small"]
    assert small["requests"] - small["refused"] == len(answers) + 2
    assert small["refused"] >= 1
    assert small["failed"] == 0
    assert small["completion_tokens"] >= sum(one.completion_tokens for one in answers) + taken
    assert small["prompt_tokens"] >= sum(one.prompt_tokens for one in answers)
    assert rows["ana", "vectors"]["prompt_tokens"] == vectors.prompt_tokens
    assert (rows["ana", "gone"]["requests"], rows["ana", "gone"]["failed"]) == (1, 1)
    assert ("ana", "unknown") not in rows
    assert usage("--key", "ana", "--model", "small") == {("ana", "small"): small}


def test_a_key_sees_its_own_usage_alone(gateway, key):
    ben, admin = key("ben"), key("boss", "--admin")
    with client_of(gateway, ben) as client:
        assert chat(client).choices
    [row] = asked(gateway, ben).json()["data"]
    assert (row["key"], row["model"], row["requests"]) == ("ben", "small", 1)
    refused = asked(gateway, ben, key="ana")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_admin")
    assert asked(gateway, admin, key="ben", by="day").json()["data"][0]["requests"] == 1
    assert asked(gateway, admin, by="hour").status_code == 400


def test_a_model_has_the_length_and_template_of_its_settings(gateway):
    with client_of(gateway) as client:
        small, brief = (chat(client, model=model, max_tokens=8).usage.prompt_tokens for model in ("small", "brief"))
        assert brief > small
        with pytest.raises(openai.BadRequestError, match="maximum context length is 48 tokens"):
            chat(client, model="brief", max_tokens=60)
        assert {model.id: getattr(model, "max_model_len", 0) for model in client.models.list()}["brief"] == 48


@pytest.mark.long
def test_a_killed_gateway_loses_no_counts(gateway):
    def requests() -> int:
        return usage("--key", "-", "--model", "small").get(("-", "small"), {}).get("requests", 0)

    before = requests()
    lines = ({"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": BODY} for n in range(40))
    data = "".join(json.dumps(one) + "\n" for one in lines).encode()
    with client_of(gateway) as client:
        for _ in range(3):
            assert chat(client).choices
        file = client.files.create(file=("r.jsonl", io.BytesIO(data)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        until(lambda: requests() > before + 3, why="requests of the batch are counted")
        gateway.kill()
        assert requests() > before + 3
        gateway.start()
    with client_of(gateway) as client:
        assert chat(client).choices
        until(lambda: client.batches.retrieve(batch.id).status == "completed", why="the end of the batch")
    until(lambda: requests() == before + 44, why="each request is counted once")
