"""A language model behind an OpenAI-compatible endpoint, within a time limit and a budget of tokens.

A site names one, or there is none. What it answers is a text like any other that comes from outside: its size is
bounded, and nothing that it says is carried out except the two tools of `agent.py`.
"""

from __future__ import annotations

import importlib
import ipaddress
import json
import os
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

Messages = list[dict[str, str]]

MOST_ANSWER_BYTES = 1_000_000
_CONNECT_S = 5.0
_CHARACTERS_A_TOKEN = 3
"""Characters for a token, where the endpoint does not say how many it counted. Source has rather more for each."""


class LanguageModel(msgspec.Struct, frozen=True):
    """Which model answers, and what one question may cost. `url` is the part before `/chat/completions`, as in
    `http://host:8000/v1`; `key_variable` names the environment variable that holds its key, if it has one."""

    url: str
    model: str
    key_variable: str = ""
    time_limit_s: float = 60.0
    token_budget: int = 30_000
    turns: int = 12


class EndpointError(Exception):
    """The endpoint did not answer as it should. Its text says how; it stays inside the advisor."""


class Conversation:
    """One question: its time and its tokens are counted over all its turns."""

    def __init__(self, model: LanguageModel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.turns = model.turns
        self._model = model
        self._clock = clock
        self._ends_at = clock() + model.time_limit_s
        self.tokens = 0
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError:
            raise EndpointError("httpx is not installed: pip install httpx") from None

    def ask(self, messages: Messages) -> str:
        """The model's next text. Raises EndpointError."""
        asked = sum(len(message["content"]) for message in messages) // _CHARACTERS_A_TOKEN
        room = self._model.token_budget - self.tokens - asked
        if room <= 0:
            raise EndpointError(f"the budget of {self._model.token_budget:,} tokens is spent")
        body = {
            "model": self._model.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": min(1_000, room),
            "stop": ["Observation:"],
        }
        try:
            answer = json.loads(self._post(body))
            text = answer["choices"][0]["message"]["content"]
            used = answer.get("usage") or {}
            counted = used.get("total_tokens", 0)
        except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(f"its answer is none of a chat's: {type(error).__name__}") from None
        if not isinstance(text, str):
            raise EndpointError("its answer has no text")
        told = counted if isinstance(counted, int) and not isinstance(counted, bool) else 0
        self.tokens += max(told, asked + len(text) // _CHARACTERS_A_TOKEN)
        if self.tokens > self._model.token_budget:
            raise EndpointError(f"the budget of {self._model.token_budget:,} tokens is spent: it took {self.tokens:,}")
        return text

    def _post(self, body: dict[str, Any]) -> bytes:
        httpx, url = self._httpx, self._model.url.rstrip("/")
        left_s = self._left_s()
        timeout = httpx.Timeout(left_s, connect=min(_CONNECT_S, left_s))
        key = os.environ.get(self._model.key_variable, "") if self._model.key_variable else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = bytearray()
        try:
            with (
                httpx.Client(
                    timeout=timeout, trust_env=not _is_loopback(url), verify=url.startswith("https")
                ) as client,
                client.stream("POST", url + "/chat/completions", json=body, headers=headers) as response,
            ):
                if response.status_code != 200:
                    raise EndpointError(f"it answered with status {response.status_code}")
                for piece in response.iter_bytes():
                    data += piece
                    self._left_s()  # one that sends a byte now and then never times out by itself
                    if len(data) > MOST_ANSWER_BYTES:
                        raise EndpointError(f"its answer is longer than {MOST_ANSWER_BYTES:,} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            raise EndpointError(f"{type(error).__name__}: {str(error)[:200]}") from None
        return bytes(data)

    def _left_s(self) -> float:
        left = self._ends_at - self._clock()
        if left <= 0:
            raise EndpointError(f"the time limit of {self._model.time_limit_s:g} s is over")
        return left


def _is_loopback(url: str) -> bool:
    """True for an endpoint on this machine: no proxy of the environment stands before it."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
