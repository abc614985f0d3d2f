"""`make soak-serve` for STOKER_SOAK_S seconds (default 60)."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from importlib.util import find_spec
from pathlib import Path

import pytest

if not all(map(find_spec, ("httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
from batch import soak_serve
from batch.lab import commands
from batch.serve_clients import Clients, Question

SECONDS = float(os.environ.get("STOKER_SOAK_S") or 60)
SEED = int(os.environ.get("STOKER_SOAK_SEED") or secrets.randbelow(10**6))
QUESTION = Question("Why?", 3)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_answers_are_complete_and_correct_under_any_fault(tmp_path: Path, monkeypatch):
    if why := commands.missing_for_slurm():
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)
    soak = soak_serve.ServeSoak(tmp_path / "record", seed=SEED, every_s=25.0, walltime="2 min", clients=4, pause_s=3.0)
    record = soak.run(seconds=SECONDS)
    said = f"STOKER_SOAK_SEED={SEED}\n" + "\n".join([*soak_serve.told(record), json.dumps(record, default=str)])
    assert record["ok"], said
    assert record["done"]["manager killed"] == record["done"]["gateway killed"] == 1, said
    assert record["done"]["preempted"] + record["done"]["cancelled"] >= 1, said
    assert min(record["ended"]["stream"], record["ended"]["plain"]) >= 3, said


def answers(*replies):
    """Return clients with a fake gateway that returns or raises these replies in order."""
    clients = Clients("http://gateway", clients=1, seed=1)
    clients.right[QUESTION] = "abc"
    queue = list(replies)

    def reply(_request):
        found = queue.pop(0)
        if isinstance(found, Exception):
            raise found
        if callable(found):
            return found(_request)
        return httpx.Response(200, text=found) if isinstance(found, str) else found

    async def ask():
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply), base_url=clients.url) as client:
            await clients._request(client, QUESTION, stream=True)

    return clients, lambda: asyncio.run(ask())


def stream(*texts, end=True):
    chunks = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    if end:
        chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
    return "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + ("data: [DONE]\n\n" if end else "")


def test_complete_and_correct_stream_is_counted():
    clients, ask = answers(stream("a", "b", "c"))
    ask()
    assert clients.tally.ended == {"stream": 1}


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (stream("a", "b", "b", "c"), "another text, from character 2"),
        (stream("a", "b"), "another text, 2 for 3 characters"),
        (stream("a", "b", "c", end=False), "without [DONE]"),
        (httpx.Response(503, text="later"), "status 503"),
        ('data: {"error": {"code": "cancelled"}}\n\n', "error event"),
        (httpx.ReadError("reset"), "ReadError"),
    ],
)
def test_incomplete_wrong_or_failed_answer_counts_as_failed(reply, why):
    clients, ask = answers(reply)
    ask()
    assert clients.tally.ended == {"stream failed": 1}
    assert why in clients.tally.failed[0]["why"]
