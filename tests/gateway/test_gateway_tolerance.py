"""Requests of other clients: many and wide embeddings, odd histories, options that an engine lacks."""

from __future__ import annotations

import base64
import json
import subprocess
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from gateway.running import LIMIT_S, MODELS, SERVE, RunningGateway
from openai.types import CreateEmbeddingResponse
from tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
QUESTION = {"role": "user", "content": "What is two plus two?"}
TEXTS, WIDTH = 2048, 4096
WIDE = """
[models.wide]
path = "models/wide"
kind = "embedding"

[models.cold]
path = "models/cold"
"""


@pytest.fixture(scope="module")
def gateway(world):
    running = RunningGateway(world.path / "tolerant")
    write_tiny_model(running.folder / "models" / "wide", width=WIDTH, layers=1)
    write_tiny_model(running.folder / "models" / "cold", seed=1)
    (running.folder / "models.toml").write_text(MODELS + WIDE)
    running.start()
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        yield client


def state(gateway, name):
    models = httpx.get(f"{gateway.url}/status", timeout=LIMIT_S).json()["models"]
    return next(model["state"] for model in models if model["name"] == name)


# ---- embeddings


def test_as_many_and_as_wide_vectors_as_openais_are_given(client, gateway):
    texts = [f"{number}" for number in range(TEXTS)]
    packed = client.embeddings.create(model="wide", input=texts)  # the client asks for base64
    assert [len(one.embedding) for one in packed.data] == [WIDTH] * TEXTS
    assert [one.index for one in packed.data] == list(range(TEXTS))
    assert packed.usage.prompt_tokens == sum(map(len, texts))
    some = client.embeddings.create(model="wide", input=[texts[0], texts[-1]], encoding_format="float")
    CreateEmbeddingResponse.model_validate(some.model_dump(), strict=True)
    assert some.data[1].embedding == pytest.approx(packed.data[-1].embedding, abs=1e-5)
    body = {"model": "wide", "input": texts, "encoding_format": "float"}
    with httpx.stream("POST", f"{gateway.url}/v1/embeddings", json=body, timeout=LIMIT_S) as plain:
        found = json.loads(plain.read())
    assert found["data"][-1]["embedding"] == pytest.approx(packed.data[-1].embedding, abs=1e-5)
    assert (len(found["data"]), found["usage"]["total_tokens"]) == (TEXTS, packed.usage.total_tokens)


def test_dimensions_are_those_of_the_model_or_refused(client):
    [one] = client.embeddings.create(model="wide", input="x", dimensions=WIDTH).data
    assert len(one.embedding) == WIDTH
    with pytest.raises(openai.BadRequestError, match=f"this model's vectors have {WIDTH} numbers") as refused:
        client.embeddings.create(model="wide", input="x", dimensions=256)
    assert refused.value.param == "dimensions"


def test_a_batch_file_embeds_as_many_texts(gateway, tmp_path):
    body = {"model": "any", "input": ["xy"] * 600, "encoding_format": "base64", "dimensions": WIDTH}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body},
        {"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": {**body, "dimensions": 7}},
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["batch", "r.jsonl", "--model", str(gateway.folder / "models" / "wide"), "--out", "out"]
    words += ["--session", gateway.session]
    subprocess.run([*SERVE, *words], cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=False)
    [answer] = (tmp_path / "out" / "responses.jsonl").read_text().splitlines()
    vectors = json.loads(answer)["response"]["body"]["data"]
    assert [len(base64.b64decode(one["embedding"])) for one in vectors] == [4 * WIDTH] * 600
    [error] = (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    assert json.loads(error)["response"]["body"]["error"]["param"] == "dimensions"


# ---- histories and fields


def test_answers_are_accepted_as_history_and_ignored_fields_noted(client, gateway):
    messages = [QUESTION]
    for _ in range(3):
        answer = client.chat.completions.create(
            model="small", messages=messages, max_tokens=4, user="ana", metadata={"run": "7"}, store=True
        )
        history = {**answer.choices[0].message.model_dump(), "annotations": [], "tool_calls": []}
        messages += [history, {**QUESTION, "name": "ana", "metadata": {"page": 3}}]
    said = "".join(gateway.said)
    for field in ("user", "metadata", "store", "messages[].annotations", "messages[].metadata"):
        assert said.count(f"requests have the field {field}, ") == 1


def test_tokens_that_end_a_text_are_those_that_are_asked_for(client):
    def ask(stream, **body):
        found = client.completions.create(
            model="small", prompt="One", max_tokens=40, temperature=0, stream=stream, extra_body=body,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )  # fmt: skip
        if not stream:
            return found.choices[0].text, found.usage.completion_tokens
        chunks = list(found)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage.completion_tokens

    for stream in (False, True):
        text, _ = ask(stream, ignore_eos=True)
        assert ask(stream, ignore_eos=True, stop_token_ids=list(range(300)))[1] == 1
        assert ask(stream, ignore_eos=True, stop_token_ids=[]) == (text, 40)


def test_bytes_of_tokens_are_those_of_the_text(client):
    """The tokens of this model are bytes, and most are parts of characters."""
    options = {"messages": [QUESTION], "max_tokens": 60, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(model="small", **options)
    stream = client.chat.completions.create(model="small", **options, stream=True)
    found = whole.choices[0].logprobs.content
    pieces = [one for chunk in stream if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    ends = whole.choices[0].finish_reason == "stop"  # the token that ends a text does not count
    text = b"".join(bytes(one.bytes) for one in (found[:-1] if ends else found))
    assert text.decode(errors="replace") == whole.choices[0].message.content
    assert any(one.token == "\N{REPLACEMENT CHARACTER}" for one in found)
    assert all(len(one.bytes) == 1 for one in found[:-1])
    assert [(one.bytes, one.token) for one in pieces] == [(one.bytes, one.token) for one in found]
    assert any(likely.bytes != [0xEF, 0xBF, 0xBD] for one in found for likely in one.top_logprobs)
    plain = client.completions.create(model="small", prompt="One", max_tokens=60, temperature=0, logprobs=3)
    assert all(len(likeliest) == 3 for likeliest in plain.choices[0].logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            "response_format",
        ),
        ({"top_k": 5}, "top_k"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ],
)
def test_what_the_engine_has_not_is_refused_without_a_load(client, gateway, stream, body, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="cold", messages=[QUESTION], stream=stream, extra_body=body)
    assert (refused.value.param, refused.value.code) == (param, "unsupported_value")
    assert state(gateway, "cold") == "cold"
    line = {"model": "cold", "messages": [QUESTION], **body}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": line}
    (gateway.folder / "check.jsonl").write_text(json.dumps(request))
    words = ["batch", "check.jsonl", "--models", "models.toml", "--check", "--json"]
    done = subprocess.run([*SERVE, *words], cwd=gateway.folder, capture_output=True, timeout=LIMIT_S, check=False)
    [line] = json.loads(done.stdout)["refused"]
    assert line["error"]["param"] == param
