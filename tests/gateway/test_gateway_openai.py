"""Test a gateway with OpenAI's client: answers, errors, slow readers, disconnects, metrics and batches. Every body
matches OpenAI's types exactly. Bodies are read from the wire, because OpenAI's client checks nothing.
"""

from __future__ import annotations

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
from faults.world import kill
from gateway.asking import CHAT, QUESTION, batch_lines, begin_batch, chat, figures, text_of
from gateway.bodies import strict
from gateway.metrics_queried import has_metric, metrics_queried
from gateway.running import LIMIT_S, MODELS, until
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from tiny_model import write_tiny_model

from stoker.pilot.core.lifecycle import MOST_GRACE_S

pytestmark = pytest.mark.slow
TEXT = "/v1/completions"
SAID = {"model": "small", "messages": QUESTION, "max_tokens": 4}
PROMPTED = {"model": "small", "prompt": ["One", "Two"], "max_tokens": 4}
ENDLESS = """
[models.endless]
path = "models/endless"

[models.embedder]
path = "models/endless"
kind = "embedding"
"""
ZYGOTE = "stoker.pilot.zygote"
"""The command line of the zygote and of its forked libraries."""
MOST = 30_000
"""Tokens of a text that the model `endless` needs minutes to write."""
LEAVES_S = 0.3
"""Seconds without data after which a client leaves."""
READS_EVERY_S = 0.05
"""Seconds between reads of the long stream: a slow reader saves the model work."""
LOAD_S = 8.0
"""Seconds of a load of these models. Calls have the same time to react to a stop, because a busy machine needs it."""
SETTLED_S = MOST_GRACE_S + 2.0
"""Seconds after which a pilot has killed every library whose stopped call still runs."""


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        write_tiny_model(folder / "models" / "endless", ends=False, longest=32_768)
        (folder / "models.toml").write_text(MODELS + ENDLESS)

    return write


def parsed(kind, body):
    return strict(kind.model_validate(body, strict=True))


def events(http, address, body):
    with http.stream("POST", address, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- bodies


def test_listed_models_have_openais_type(client, http):
    listed = http.get("/v1/models").json()
    assert listed.keys() == {"object", "data"}
    names = ["small", "vectors", "gone", "huge", "shy", "swift", "fleeting", "endless", "embedder"]
    assert [model["id"] for model in listed["data"]] == names
    for model in (*listed["data"], http.get("/v1/models/small").json()):
        model.pop("max_model_len", None)  # a field of vLLM that OpenAI's type lacks
        assert parsed(Model, model).owned_by == "stoker"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


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
def test_answers_have_openais_types(http, address, body, kind):
    parsed(kind, http.post(address, json=body).json())


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(
    ("address", "body"),
    [(CHAT, SAID), (CHAT, {**SAID, "logprobs": True}), (TEXT, PROMPTED), (TEXT, {**PROMPTED, "logprobs": 1})],
)
def test_chunks_have_openais_types(http, address, body, more):
    chunks = events(http, address, {**body, **more})
    for chunk in chunks:
        for choice in chunk["choices"]:
            if address == TEXT and choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"  # null before the end, as in OpenAI's responses
        parsed(ChatCompletionChunk if address == CHAT else Completion, chunk)
    assert (chunks[-1].get("usage") is not None) is bool(more)


def test_batch_of_an_uploaded_file_has_openais_types(http, client):
    wrong = json.dumps({"custom_id": "w", "method": "POST", "url": CHAT, "body": {**SAID, "model": "other"}})
    upload = {"file": ("in.jsonl", batch_lines(5) + wrong.encode())}
    file = parsed(FileObject, http.post("/v1/files", files=upload, data={"purpose": "batch"}).json())
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "metadata": {"run": "1"}}
    batch = parsed(Batch, http.post("/v1/batches", json=asked).json())
    assert batch.metadata == {"run": "1"}
    failed = parsed(Batch, http.post("/v1/batches", json={**asked, "endpoint": TEXT}).json())
    assert failed.errors.data[0].message

    def over():
        found = parsed(Batch, http.get(f"/v1/batches/{batch.id}").json())
        return found if found.status != "in_progress" else None

    done = until(over, why="the end of the batch")
    assert done.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    answers = [json.loads(each) for each in client.files.content(done.output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"r{n}" for n in range(5)]
    for answer in answers:
        parsed(ChatCompletion, answer["response"]["body"])
    [error] = [json.loads(each) for each in http.get(f"/v1/files/{done.error_file_id}/content").text.splitlines()]
    assert error["custom_id"] == "w"
    parsed(ErrorObject, error["response"]["body"]["error"])
    assert done.id in [each.id for each in client.batches.list(limit=5)]
    for address, kind in (("/v1/files", FileObject), ("/v1/batches", Batch)):
        listed = http.get(address, params={"limit": 2}).json()
        assert listed.keys() == {"object", "data", "first_id", "last_id", "has_more"}
        assert [parsed(kind, one).id for one in listed["data"]][-1] == listed["last_id"]
    parsed(FileDeleted, http.delete(f"/v1/files/{file.id}").json())
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    listed = http.get("/v1/batches", params={"limit": 1}).json()
    assert listed["has_more"]


# ---- answers


def test_streamed_chat_equals_the_unstreamed_chat_and_obeys_stop(client):
    options = {"n": 2, "seed": 5, "max_tokens": 40, "temperature": 1}
    whole = chat(client, **options)
    texts, ends, usage = {0: "", 1: ""}, {}, None
    for chunk in chat(client, **options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    text = whole.choices[0].message.content
    cut = text_of(chat(client, **{**options, "n": 1}, stop=[text[5:8]], stream=True))
    assert cut == text[: text.index(text[5:8])]


def test_each_prompt_of_a_completion_gets_its_choices(client):
    asked = {"model": "small", "prompt": ["One", "Two"], "max_tokens": 6, "logprobs": 1, "n": 2, "seed": 1}
    answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 6
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in answer.choices}


# ---- errors in OpenAI's form


@pytest.mark.parametrize(
    ("options", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"model": "vectors"}, 400, "model_mismatch", "model"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "context_length_exceeded", "messages"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "unsupported_value", "tools[0].type"),
        ({"extra_body": {"guided_regex": "(a"}}, 400, "invalid_value", "guided_regex"),
        ({"model": "gone"}, 503, "model_unavailable", None),
        ({"model": "gone", "stream": True}, 503, "model_unavailable", None),
        ({"model": "huge"}, 503, "model_fits_nowhere", None),
    ],
)
def test_unanswerable_request_gets_its_error_status_and_code(client, options, status, code, param):
    with pytest.raises(openai.APIError) as refused:
        for _ in chat(client, **options):
            pass
    error = parsed(ErrorObject, refused.value.body)
    assert (error.code, error.param, bool(error.message)) == (code, param, True)
    if isinstance(refused.value, openai.APIStatusError):
        assert refused.value.status_code == status
        assert refused.value.response.json().keys() == {"error"}
    else:
        # The stream has an error event: on a slow machine its headers were sent before the error.
        assert "stream" in options


@pytest.mark.parametrize(
    ("method", "address", "body", "status", "param"),
    [
        ("GET", CHAT, None, 405, None),
        ("GET", "/v1/files/file-x", None, 404, "id"),
        ("GET", "/v1/batches?limit=²", None, 400, "limit"),
        ("GET", f"/v1/batches?limit={'9' * 5000}", None, 400, "limit"),
        ("POST", "/v1/batches", {"endpoint": {"a": 1}}, 400, "endpoint"),
        ("POST", "/v1/batches", [], 400, None),
    ],
)
def test_errors_have_the_format_of_openai(http, method, address, body, status, param):
    answer = http.request(method, address, json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    error = parsed(ErrorObject, answer.json()["error"])
    assert (error.param, bool(error.message)) == (param, True)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_follows_its_json_schema_and_a_bad_schema_is_refused(client, stream):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    answer = chat(client, response_format=form, max_tokens=200, stream=stream)
    text = text_of(answer) if stream else answer.choices[0].message.content
    assert json.loads(text)["n"] <= 9
    form["json_schema"]["schema"] = {"type": "object", "properties": {"n": {"type": "number!"}}}
    with pytest.raises(openai.APIError, match="JSON schema cannot be compiled") as refused:
        list(chat(client, response_format=form, stream=stream))
    assert refused.value.body["param"] == "response_format"


def test_invalid_request_bodies_are_refused(http):
    for path, data, expected in (
        ("/v1/nothing", b"{}", (404, "unknown_url")),
        (CHAT, b"{", (400, "invalid_json")),
        (CHAT, b" " * 100_000_000, (413, "request_too_large")),
    ):
        answer = http.post(path, content=data)
        error = parsed(ErrorObject, answer.json()["error"])
        assert (answer.status_code, error.code, error.param) == (*expected, None)


def test_cold_model_refuses_requests_that_do_not_wait(client, http):
    with pytest.raises(openai.InternalServerError) as refused:
        chat(client, model="shy")
    assert refused.value.code == "model_cold"
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert chat(client, model="shy", extra_headers={"Prefer": "wait=600"}).choices
    assert chat(client, model="shy").choices  # the model is loaded now, so this request need not wait


def test_request_that_would_be_late_is_refused_unless_it_may_wait(client):
    with pytest.raises(openai.InternalServerError) as refused:
        chat(client, model="swift", stream=True)
    assert (refused.value.status_code, refused.value.code) == (503, "objective_unreachable")
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert "the objective is 1.0 ms: the model is" in refused.value.body["message"]
    assert chat(client, model="swift", extra_headers={"Prefer": "wait=86400"}).choices
    assert text_of(chat(client, model="swift", stream=True))  # the model is loaded and idle, so the request is accepted


# ---- clients that read slowly or leave


def test_slow_reader_delays_no_other_client(client, gateway):
    body = {"model": "small", "messages": QUESTION, "max_tokens": 300, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=LIMIT_S) as slow:
        assert chat(client).choices
        whole = b"".join(slow.iter_bytes())
    assert whole.endswith(b"data: [DONE]\n\n")


def body_of(kind, *, stream=False, max_tokens=MOST, count=1_200):
    """`count`: number of short texts. The call can stop after each small batch of texts."""
    if kind == "embeddings":
        texts = ["paris lies in france " * 2] * count
        return "/v1/embeddings", {"model": "embedder", "input": texts, "encoding_format": "base64"}
    asked = {"model": "endless", "max_tokens": max_tokens, "stream": stream}
    if kind == "completions":
        return TEXT, {**asked, "prompt": "?"}
    return CHAT, {**asked, "messages": QUESTION, **({"n": 2} if kind == "two choices" else {})}


def libraries(world):
    """Return all libraries ever started: each has its own log."""
    return sorted({path.name for path in world.path.rglob("lib-*.log")})


def load_slowly(world, http, *requests):
    """Load the models of these requests while their libraries are suspended."""
    before = set(world.of(ZYGOTE))
    with ThreadPoolExecutor(len(requests)) as threads:
        asked = [threads.submit(http.post, url, json=body) for url, body in requests]
        started = until(
            lambda: len(found := set(world.of(ZYGOTE)) - before) >= len(requests) and found, why="the libraries start"
        )
        kill(started, signal.SIGSTOP)
        time.sleep(LOAD_S)
        kill(started, signal.SIGCONT)
    assert [one.result().status_code for one in asked] == [200] * len(requests)


def open_calls(gateway):
    calls = figures(gateway)["calls"]
    return calls["running"] + calls["queued"]


def events_of(answer):
    """Yield a stream's events. httpx's own line splitting would also split at characters inside texts."""
    left = b""
    for data in answer.iter_bytes():
        *whole, left = (left + data).split(b"\n\n")
        yield from whole


@contextmanager
def reads(http):
    """Read a long stream as another client. Check at the end that pieces arrive and that no library ended."""
    url, body = body_of("chat", stream=True)
    with http.stream("POST", url, json=body) as answer:
        events = events_of(answer)
        next(events)
        yield
        settled_at = time.monotonic() + SETTLED_S
        pieces = 0
        for event in events:
            pieces += event.startswith(b'data: {"id"')
            if time.monotonic() > settled_at:
                break
            time.sleep(READS_EVERY_S)
        assert pieces > 1


def leave(gateway, kind, *, stream):
    url, body = body_of(kind, stream=stream)
    with httpx.Client(base_url=gateway.url, timeout=httpx.Timeout(LIMIT_S, read=LEAVES_S)) as client:
        if stream:
            with client.stream("POST", url, json=body, timeout=LIMIT_S) as answer:
                next(events_of(answer))
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(url, json=body)


@pytest.mark.long
def test_libraries_survive_client_disconnects_and_a_cancelled_batch(world, gateway, http, client):
    """Other clients keep their stream, their model and its cache."""
    chat(client)  # the process from which libraries are forked has started
    load_slowly(world, http, body_of("chat", max_tokens=2), body_of("embeddings", count=1))
    _, body = body_of("chat")
    before = libraries(world)
    with reads(http):
        for kind, stream in (
            ("chat", True), ("two choices", False), ("completions", False), ("completions", True),
            ("embeddings", False),
        ):  # fmt: skip
            leave(gateway, kind, stream=stream)
            until(lambda: open_calls(gateway) == 1, why=f"the call of the client that has left has ended: {kind}")
        batch = begin_batch(client, batch_lines(40, **body))
        until(lambda: figures(gateway)["calls"]["running"] > 1, why="the batch runs")
        assert client.batches.cancel(batch.id).status == "cancelling"
        until(lambda: client.batches.retrieve(batch.id).status == "cancelled", why="the batch is cancelled")
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        until(lambda: open_calls(gateway) == 1, why="its calls have ended")
    url, body = body_of("chat", max_tokens=2)
    assert len(http.post(url, json=body).json()["choices"]) == 1
    assert libraries(world) == before


# ---- pages and figures


def test_page_loads_nothing_from_other_sites_and_updates_live(client, http):
    chat(client)
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text  # the page loads nothing from other sites
    assert "https://" not in page.text
    until(lambda: http.get("/status").json()["models"][0]["state"] == "hot", why="the library is shown")
    shown = http.get("/status").json()
    assert {"name": "gone", "state": "trouble"}.items() <= shown["models"][2].items()
    assert shown["pilots"][0]["devices"]
    with http.stream("GET", "/status", headers={"Accept": "text/event-stream"}) as events:
        lines = (line for line in events.iter_lines() if line.startswith('data: {"at"'))
        for _ in range(2):
            assert json.loads(next(lines).removeprefix("data: "))["session"] == shown["session"]


def test_gateway_has_the_metrics_that_grafana_queries(client, http):
    with chat(client, stream=True, max_tokens=200, temperature=1, seed=3) as stream:
        list(stream)
    chat(client)
    for pattern in (
        r'^stoker_model_hot\{model_name="small"\} [1-9]',
        r'stoker_gateway_requests_total\{endpoint="/v1/chat/completions",model_name="small",status="200"\}',
    ):
        until(lambda found=pattern: re.search(found, http.get("/metrics").text, re.MULTILINE), why=pattern)
    assert http.get("/health").json()["status"] == "ok"

    def missing():
        text, dashboard = http.get("/metrics").text, http.get("/grafana.json").json()
        return [name for name in metrics_queried(dashboard, row="Models of a gateway") if not has_metric(text, name)]

    until(lambda: not missing(), why=f"the metrics {missing()}")
    ended = 'stoker_request_success_total{finished_reason="length",model_name="small"}'
    until(lambda: ended in http.get("/metrics").text, why="the last answer is counted")
    assert re.search(r'^stoker_num_requests_running{model_name="small"', http.get("/metrics").text, re.MULTILINE)


# ---- batches


def test_invalid_batch_is_refused(client):
    for data, said in ((batch_lines(1, url="/v1/embeddings"), "line 1: url is"), (b"\n", "the file has no requests")):
        failed = client.batches.retrieve(begin_batch(client, data).id)
        assert failed.status == "failed"
        assert failed.errors.data[0].message.startswith(said)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_x")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x", b"x"), purpose="fine-tune")
