"""Requests to a gateway. Test files that import this module are skipped if a package is missing."""

from __future__ import annotations

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
