"""Requests to a gateway. Test files that import this module are skipped if a package is missing."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from gateway.running import LIMIT_S, RunningGateway

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is two plus two?"}]
SITE = "https://lab.example"
BODY = {"model": "small", "messages": QUESTION, "max_tokens": 8, "temperature": 0}


def preflight_of(site: str) -> dict[str, str]:
    return {
        "Origin": site, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }  # fmt: skip


def client_at(url: str, key: str = "none", **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=LIMIT_S, max_retries=0, **options)


def client_of(gateway: RunningGateway, key: str = "none") -> openai.OpenAI:
    return client_at(gateway.url, key)


def chat(client, **options):
    return client.chat.completions.create(**{**BODY, **options})


def batch_lines(count: int, *, url: str = CHAT, **body) -> bytes:
    """Return a batch file with the requests r0, r1, ... `body`: fields of each body other than those of `BODY`."""
    requests = ({"custom_id": f"r{n}", "method": "POST", "url": url, "body": {**BODY, **body}} for n in range(count))
    return "".join(json.dumps(each) + "\n" for each in requests).encode()


def begin_batch(client, data: bytes):
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    assert client.files.content(file.id).read() == data
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def text_of(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def answer_of(client) -> str:
    """Return the model's answer without streaming; check that the streamed answer is equal."""
    text = chat(client).choices[0].message.content
    assert text_of(chat(client, stream=True)) == text
    return text


def figures(gateway: RunningGateway) -> dict:
    return httpx.get(f"{gateway.url}/status", timeout=LIMIT_S).json()


def model_of(gateway: RunningGateway, name: str) -> dict:
    return next(model for model in figures(gateway)["models"] if model["name"] == name)


def is_refused(client, code: str) -> openai.RateLimitError | None:
    try:
        chat(client)
    except openai.RateLimitError as error:
        return error if error.code == code else None
    return None
