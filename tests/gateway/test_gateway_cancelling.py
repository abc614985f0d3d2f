from __future__ import annotations

import io
import json
import time
from contextlib import contextmanager

import httpx
import pytest
from gateway.asking import CHAT, client_of, openai
from gateway.running import LIMIT_S, until
from tiny_encoder import write_tiny_encoder
from tiny_model import write_tiny_model

from stoker.pilot.core.lifecycle import MOST_GRACE_S

pytestmark = pytest.mark.slow
MODELS = """
[models.small]
path = "models/endless"
cold = "wait"

[models.vectors]
path = "models/embedder"
kind = "embedding"
cold = "wait"
"""
MOST = 30_000
"""Tokens of a text, which takes the model minutes."""
LEAVES_S = 0.3
"""Seconds without data after which a client leaves."""
READS_EVERY_S = 0.05
"""Seconds between reads of the long stream: a slow reader saves the model work."""
SETTLED_S = MOST_GRACE_S + 2.0
"""Seconds after which a pilot has killed each library that still runs a stopped call."""


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        write_tiny_model(folder / "models" / "endless", ends=False, longest=32_768)
        write_tiny_encoder(folder / "models" / "embedder")
        (folder / "models.toml").write_text(MODELS)

    return write


@pytest.fixture(scope="module", autouse=True)
def _loaded(gateway):
    ask(gateway, "chat", max_tokens=2)
    ask(gateway, "embeddings", count=1)


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
    """Return all libraries ever started: each has its own log."""
    return sorted({path.name for path in world.path.rglob("lib-*.log")})


def open_calls(http):
    calls = http.get("/status").json()["calls"]
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


def test_clients_that_leave_and_batches_cost_no_other_its_model(world, gateway, http):
    _, body = body_of("chat")
    requests = ({"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": body} for n in range(40))
    data = "".join(json.dumps(one) + "\n" for one in requests).encode()
    before = libraries(world)
    with (
        reads(http),
        httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as other,
        client_of(gateway) as api,
    ):
        for kind, stream in (
            ("chat", True), ("two choices", False), ("completions", False), ("completions", True),
            ("embeddings", False),
        ):  # fmt: skip
            leave(gateway, kind, stream=stream)
            until(lambda: open_calls(other) == 1, why=f"the call of the client that has left has ended: {kind}")
        file = api.files.create(file=("requests.jsonl", io.BytesIO(data)), purpose="batch")
        batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        until(lambda: other.get("/status").json()["calls"]["running"] > 1, why="the batch runs")
        assert api.batches.cancel(batch.id).status == "cancelling"
        until(lambda: api.batches.retrieve(batch.id).status == "cancelled", why="the batch is cancelled")
        with pytest.raises(openai.ConflictError):
            api.batches.cancel(batch.id)
        until(lambda: open_calls(other) == 1, why="its calls have ended")
    assert len(ask(gateway, "chat", max_tokens=2)["choices"]) == 1
    assert libraries(world) == before, "no library ended"
