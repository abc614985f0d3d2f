"""When a client leaves, its request stops in the model, and the library continues to serve the other clients."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from gateway.running import LIMIT_S, RunningGateway, until
from tiny_encoder import write_tiny_encoder
from tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
MODELS = """
[models.small]
path = "models/tiny"
cold = "wait"

[models.vectors]
path = "models/embedder"
kind = "embedding"
cold = "wait"
"""
CHAT = "/v1/chat/completions"
MOST = 1_900
"""Tokens of a text, which takes the model seconds."""
READ = 800
"""Tokens of the text that another client reads meanwhile."""
LEAVES_S = 0.3
"""A client that reads nothing for this long leaves."""


@pytest.fixture(scope="module")
def gateway(world) -> Iterator[RunningGateway]:
    folder = world.path / "work"
    (folder / "models").mkdir(parents=True)
    write_tiny_model(folder / "models" / "tiny", ends=False)
    write_tiny_encoder(folder / "models" / "embedder")
    running = RunningGateway(folder)
    (folder / "models.toml").write_text(MODELS)
    running.start()
    try:
        ask(running, "chat", max_tokens=2)
        ask(running, "embeddings", count=1)
        yield running
    finally:
        running.end()


@pytest.fixture
def http(gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as client:
        yield client


def body_of(kind, *, stream=False, max_tokens=MOST, count=2_000):
    match kind:
        case "chat" | "two choices":
            question = [{"role": "user", "content": "?"}]
            more = {"n": 2} if kind == "two choices" else {}
            return CHAT, {"model": "small", "messages": question, "max_tokens": max_tokens, "stream": stream, **more}
        case "completions":
            return "/v1/completions", {"model": "small", "prompt": "?", "max_tokens": max_tokens, "stream": stream}
        case _:
            texts = ["paris lies in france " * 8] * count
            return "/v1/embeddings", {"model": "vectors", "input": texts, "encoding_format": "base64"}


def ask(gateway, kind, **options):
    url, body = body_of(kind, **options)
    answer = httpx.post(f"{gateway.url}{url}", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def libraries(world):
    """The libraries that were ever started: each has a log of its own."""
    return sorted({path.name for path in world.path.rglob("lib-*.log")})


def open_calls(http):
    calls = http.get("/status").json()["calls"]
    return calls["running"] + calls["queued"]


def events_of(answer):
    """The events of a stream. Lines of httpx end at characters that a text may have, too."""
    left = b""
    for data in answer.iter_bytes():
        *whole, left = (left + data).split(b"\n\n")
        yield from whole


def reads(http):
    """A long stream of another client."""
    url, body = body_of("chat", stream=True, max_tokens=READ)
    return http.stream("POST", url, json=body)


def leave(gateway, kind, *, stream):
    """Ask for something long, and leave."""
    url, body = body_of(kind, stream=stream)
    with httpx.Client(base_url=gateway.url, timeout=httpx.Timeout(LIMIT_S, read=LEAVES_S)) as client:
        if stream:
            with client.stream("POST", url, json=body, timeout=LIMIT_S) as answer:
                next(events_of(answer))
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(url, json=body)


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        ("chat", False), ("chat", True), ("two choices", False), ("completions", False), ("completions", True),
        ("embeddings", False),
    ],
)  # fmt: skip
def test_another_client_has_its_whole_stream_when_one_leaves(world, gateway, http, kind, stream):
    before = libraries(world)
    with reads(http) as reading:
        events = events_of(reading)
        next(events)
        leave(gateway, kind, stream=stream)
        with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as other:
            until(lambda: open_calls(other) <= 1, why="the call of the client that has left has ended")
        *_, last, done = events
    assert done == b"data: [DONE]"
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert libraries(world) == before, "no library ended"
    assert len(ask(gateway, "chat", max_tokens=2)["choices"]) == 1


def test_a_batch_that_is_cancelled_stops_and_others_go_on(world, gateway, http):
    _, body = body_of("chat")
    requests = ({"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": body} for n in range(40))
    data = "".join(json.dumps(one) + "\n" for one in requests).encode()
    before = libraries(world)
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S) as api,
        reads(http) as reading,
    ):
        events = events_of(reading)
        next(events)
        file = api.files.create(file=("requests.jsonl", io.BytesIO(data)), purpose="batch")
        batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as other:
            until(lambda: other.get("/status").json()["calls"]["running"] > 1, why="the batch runs")
            api.batches.cancel(batch.id)
            until(lambda: api.batches.retrieve(batch.id).status == "cancelled", why="the batch is cancelled")
            until(lambda: open_calls(other) <= 1, why="its calls have ended")
        assert list(events)[-1] == b"data: [DONE]"
    assert libraries(world) == before, "no library ended"
