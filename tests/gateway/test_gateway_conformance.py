"""Every body of the gateway matches OpenAI's types: no field is missing, mistyped or unknown. Bodies are read from the
wire, because OpenAI's client checks nothing.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
from gateway.running import LIMIT_S, until
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel

pytestmark = pytest.mark.slow
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "?"}]
SAID = {"model": "small", "messages": QUESTION, "max_tokens": 4}
PROMPTED = {"model": "small", "prompt": ["One", "Two"], "max_tokens": 4}


@pytest.fixture(scope="module")
def http(gateway):
    with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as client:
        yield client


def strict(kind, body):
    """The body as its type reads it, with no field that the type does not know."""
    read = kind.model_validate(body, strict=True)
    assert not list(_unknown(read, kind.__name__))
    return read


def _unknown(value, place):
    if isinstance(value, BaseModel):
        yield from (f"{place}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unknown(one, f"{place}[{number}]")


def events(http, address, body):
    with http.stream("POST", address, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("address", "body", "kind"),
    [
        (CHAT, {**SAID, "n": 2}, ChatCompletion),
        (CHAT, {**SAID, "logprobs": True, "top_logprobs": 2}, ChatCompletion),
        (CHAT, {"model": "small", "messages": QUESTION, "max_completion_tokens": 4}, ChatCompletion),
        (TEXT, {**PROMPTED, "logprobs": 2}, Completion),
        (TEXT, PROMPTED, Completion),
        ("/v1/embeddings", {"model": "vectors", "input": ["one", "two"]}, CreateEmbeddingResponse),
    ],
)
def test_answers(http, address, body, kind):
    strict(kind, http.post(address, json=body).json())


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(
    ("address", "body"),
    [(CHAT, SAID), (CHAT, {**SAID, "logprobs": True}), (TEXT, PROMPTED), (TEXT, {**PROMPTED, "logprobs": 1})],
)
def test_chunks(http, address, body, more):
    chunks = events(http, address, {**body, **more})
    for chunk in chunks:
        for choice in chunk["choices"]:
            if address == TEXT and choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"  # null before the end, as OpenAI's own are; the type has it otherwise
        strict(ChatCompletionChunk if address == CHAT else Completion, chunk)
    assert (chunks[-1].get("usage") is not None) is bool(more)


def test_models_and_lists(http):
    listed = http.get("/v1/models").json()
    assert listed.keys() == {"object", "data"}
    one = http.get("/v1/models/small").json()
    for model in (*listed["data"], one):
        model.pop("max_model_len", None)  # vLLM's
        assert strict(Model, model).object == "model"


def test_files_and_batches(http):
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": SAID})
    wrong = json.dumps({"custom_id": "b", "method": "POST", "url": CHAT, "body": {**SAID, "model": "other"}})
    upload = {"file": ("in.jsonl", f"{line}\n{wrong}\n".encode())}
    file = strict(FileObject, http.post("/v1/files", files=upload, data={"purpose": "batch"}).json())
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "metadata": {"run": "1"}}
    batch = strict(Batch, http.post("/v1/batches", json=asked).json())
    assert batch.metadata == {"run": "1"}
    failed = strict(Batch, http.post("/v1/batches", json={**asked, "endpoint": TEXT}).json())
    assert failed.errors.data[0].message

    def over():
        found = strict(Batch, http.get(f"/v1/batches/{batch.id}").json())
        return found if found.status != "in_progress" else None

    done = until(over, why="the end of the batch")
    answers = http.get(f"/v1/files/{done.output_file_id}/content").text.splitlines()
    [answer] = [json.loads(answer) for answer in answers]
    strict(ChatCompletion, answer["response"]["body"])
    [error] = [json.loads(each) for each in http.get(f"/v1/files/{done.error_file_id}/content").text.splitlines()]
    strict(ErrorObject, error["response"]["body"]["error"])
    for address, kind in (("/v1/files", FileObject), ("/v1/batches", Batch)):
        listed = http.get(address, params={"limit": 2}).json()
        assert listed.keys() == {"object", "data", "first_id", "last_id", "has_more"}
        assert [strict(kind, one).id for one in listed["data"]][-1] == listed["last_id"]
    strict(FileDeleted, http.delete(f"/v1/files/{file.id}").json())
    listed = http.get("/v1/batches", params={"limit": 1}).json()
    assert listed["has_more"]


@pytest.mark.parametrize(
    ("method", "address", "body", "status", "param"),
    [
        ("POST", CHAT, {**SAID, "model": "other"}, 404, "model"),
        ("POST", CHAT, {**SAID, "max_tokens": 1_000_000}, 400, "messages"),
        ("POST", CHAT, {**SAID, "model": "gone"}, 503, None),
        ("POST", CHAT, {**SAID, "n": 0}, 400, "n"),
        ("GET", "/v1/nothing", None, 404, None),
        ("DELETE", "/v1/models/small", None, 405, None),
        ("GET", "/v1/files/file-x", None, 404, "id"),
        ("GET", "/v1/batches?limit=²", None, 400, "limit"),
        ("GET", f"/v1/batches?limit={'9' * 5000}", None, 400, "limit"),
        ("POST", "/v1/batches", {"endpoint": {"a": 1}}, 400, "endpoint"),
        ("POST", "/v1/batches", [], 400, None),
    ],
)
def test_errors(http, method, address, body, status, param):
    answer = http.request(method, address, json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    error = strict(ErrorObject, answer.json()["error"])
    assert (error.param, bool(error.message)) == (param, True)
