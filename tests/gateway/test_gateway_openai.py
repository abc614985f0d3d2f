"""The gateway with OpenAI's client: every answer parses strictly."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from gateway.running import LIMIT_S, until
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is two plus two?"}]


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(gateway):
    with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as client:
        yield client


def strict(kind, answer):
    """The answer, as its type reads it: no field is missing, and none is of another type."""
    return kind.model_validate(answer.model_dump() if not isinstance(answer, dict) else answer, strict=True)


def chat(client, **options):
    return client.chat.completions.create(**{"model": "small", "messages": QUESTION, "max_tokens": 8, **options})


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


# ---- answers


def test_models(client):
    assert [model.id for model in client.models.list()] == [
        "small",
        "vectors",
        "gone",
        "huge",
        "shy",
        "swift",
        "fleeting",
    ]
    assert strict(Model, client.models.retrieve("small")).owned_by == "stoker"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_conversation(client, http):
    answer = strict(ChatCompletion, chat(client, n=2, seed=5))
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 16
    again = chat(client, n=2, seed=5)
    assert [one.message.content for one in again.choices] == [one.message.content for one in answer.choices]
    body = {"model": "small", "messages": QUESTION, "max_tokens": 8}
    strict(ChatCompletion, http.post("/v1/chat/completions", json=body).json())


def test_a_conversation_in_pieces_is_the_whole_one(client):
    options = {"n": 2, "seed": 5, "max_tokens": 40}
    whole = chat(client, **options)
    texts, ends, usage = {0: "", 1: ""}, {}, None
    for chunk in chat(client, **options, stream=True, stream_options={"include_usage": True}):
        strict(ChatCompletionChunk, chunk)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


def test_likelihoods(client):
    answer = strict(ChatCompletion, chat(client, logprobs=True, top_logprobs=2, temperature=0))
    found = answer.choices[0].logprobs.content
    assert len(found) == answer.usage.completion_tokens
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in found)
    pieces = [
        one
        for chunk in chat(client, logprobs=True, top_logprobs=2, temperature=0, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert [one.token for one in pieces] == [one.token for one in found]


def test_a_completion_of_several_prompts(client):
    answer = client.completions.create(model="small", prompt=["One", "Two"], max_tokens=6, logprobs=1, n=2, seed=1)
    strict(Completion, answer)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 6
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(
        model="small", prompt=["One", "Two"], max_tokens=6, logprobs=1, n=2, seed=1, stream=True
    ):
        chunk.choices[0].finish_reason = chunk.choices[0].finish_reason or "stop"  # null there, as OpenAI's own
        strict(Completion, chunk)
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in answer.choices}


def test_a_stop_text_ends_a_stream(client):
    text = text_of(chat(client, temperature=0, max_tokens=60, stream=True))
    stop = text[5:8]
    cut = text_of(chat(client, temperature=0, max_tokens=60, stream=True, stop=[stop]))
    assert cut == text[: text.index(stop)]


def test_vectors(client, http):
    answer = client.embeddings.create(model="vectors", input=["one", "two"])  # the client asks for base64
    strict(CreateEmbeddingResponse, answer)
    body = {"model": "vectors", "input": "one", "encoding_format": "base64"}
    packed = base64.b64decode(http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == pytest.approx(answer.data[0].embedding, abs=1e-5)
    assert answer.usage.prompt_tokens == 6


def test_the_asynchronous_client(gateway):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S) as client:
            whole = await asyncio.gather(*(chat(client, temperature=0) for _ in range(8)))
            stream = await chat(client, temperature=0, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return {one.choices[0].message.content for one in whole}, "".join(pieces)

    texts, text = asyncio.run(ask())
    assert texts == {text}


# ---- errors, in OpenAI's form


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"model": "vectors"}, openai.BadRequestError, "model_mismatch"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, openai.BadRequestError, "context_length_exceeded"),
        ({"max_tokens": 1_000_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "unsupported_value"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "unsupported_value"),
        ({"model": "gone"}, openai.InternalServerError, "model_unavailable"),
        ({"model": "huge"}, openai.InternalServerError, "model_fits_nowhere"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_answered(client, options, error, code, stream):
    with pytest.raises(openai.APIError) as refused:
        for _ in chat(client, stream=stream, **options):
            pass
    is_event = stream and type(refused.value) is openai.APIError  # on a slow machine the headers had gone before
    assert is_event or type(refused.value) is error
    assert refused.value.code == code
    assert refused.value.body["message"]
    chat(client)  # and no other client notices


def test_a_schema_that_the_engine_does_not_have_is_refused(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="JSON schema"):
        chat(client, response_format=form)


def test_bodies_that_are_none(http):
    for data in (b"{", b"[1]", b""):
        answer = http.post("/v1/chat/completions", content=data)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    large = http.post("/v1/chat/completions", content=b" " * 100_000_000)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


def test_addresses_that_are_none(http):
    assert http.post("/v1/nothing", json={}).json()["error"]["code"] == "unknown_url"
    assert http.get("/v1/chat/completions").status_code == 405


def test_a_cold_model_that_does_not_want_requests_to_wait(client, http):
    with pytest.raises(openai.InternalServerError) as refused:
        chat(client, model="shy")
    assert refused.value.code == "model_cold"
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert chat(client, model="shy", extra_headers={"Prefer": "wait=600"}).choices
    assert chat(client, model="shy").choices  # it is loaded now


def test_a_late_request_is_refused_unless_its_client_waits(client):
    with pytest.raises(openai.InternalServerError) as refused:
        chat(client, model="swift", stream=True)
    assert (refused.value.status_code, refused.value.code) == (503, "objective_unreachable")
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert "its objective is 1.0 ms: it is" in refused.value.body["message"]
    assert chat(client, model="swift", extra_headers={"Prefer": "wait=86400"}).choices
    assert text_of(chat(client, model="swift", stream=True))  # it is loaded, and no request waits before this one


# ---- clients that go


def running(http):
    return {model["name"]: model["running"] for model in http.get("/status").json()["models"]}["small"]


def calls(http):
    return http.get("/status").json()["calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_call(http, gateway, stream):
    body = {"model": "small", "messages": QUESTION, "max_tokens": 2000, "temperature": 0, "stream": stream}
    asking = httpx.Client(base_url=gateway.url, timeout=httpx.Timeout(LIMIT_S, read=None if stream else 0.3))
    if stream:
        with asking.stream("POST", "/v1/chat/completions", json=body) as answer:
            events = answer.iter_lines()  # one that is dropped closes the response
            next(events)
            assert running(http) == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            asking.post("/v1/chat/completions", json=body)
    asking.close()
    until(lambda: running(http) == 0, why="the gateway lets go of the request")
    until(lambda: calls(http)["running"] == 0, why="the call ends")


def test_a_slow_reader_holds_nobody_up(client, gateway):
    body = {"model": "small", "messages": QUESTION, "max_tokens": 600, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=LIMIT_S) as slow:
        assert chat(client).choices
        whole = b"".join(slow.iter_bytes())
    assert whole.endswith(b"data: [DONE]\n\n")


# ---- what people and programs see


def test_the_page_and_its_figures(client, http):
    chat(client)
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text  # it loads nothing from elsewhere
    assert "https://" not in page.text
    until(lambda: http.get("/status").json()["models"][0]["state"] == "hot", why="the library is shown")
    figures = http.get("/status").json()
    assert {"name": "gone", "state": "trouble"}.items() <= figures["models"][2].items()
    assert figures["pilots"][0]["devices"]
    with http.stream("GET", "/status", headers={"Accept": "text/event-stream"}) as events:
        lines = (line for line in events.iter_lines() if line)
        for _ in range(2):
            assert json.loads(next(lines).removeprefix("data: "))["session"] == figures["session"]


def test_figures_for_prometheus(client, http):
    chat(client)
    hot = re.compile(r'^stoker_model_hot\{model="small"\} [1-9]', re.MULTILINE)
    until(lambda: hot.search(http.get("/metrics").text), why="the library, or more than one by now, is counted")
    text = http.get("/metrics").text
    assert 'stoker_gateway_requests_total{endpoint="/v1/chat/completions",model="small",status="200"}' in text
    assert http.get("/health").json()["status"] == "ok"
