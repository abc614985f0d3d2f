"""Client of the language model that the advisor may ask. The endpoint must be compatible with OpenAI's API. Limits
apply to time and tokens, and secrets are masked.
"""

from __future__ import annotations

import importlib
import ipaddress
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from stoker.manager.advice.secrets import mask_secrets
from stoker.site import Advice

Messages = list[dict[str, str]]

_CHAT = "/chat/completions"
MOST_ANSWER_BYTES = 1_000_000
_CONNECT_S = 5.0
_MOST_ANSWER_TOKENS = 1_000
_CHARACTERS_A_TOKEN = 3
"""Assumed characters per token if the endpoint reports no tokens."""
_SCHEMA_REFUSALS = frozenset({400, 422, 501})
"""HTTP status codes of an endpoint that does not support answer schemas."""


class EndpointError(Exception):
    """The endpoint returned no usable answer."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ModelEndpoint:
    """A language model, and the number of tokens that the session may still use. Thread-safe."""

    def __init__(self, model: Advice) -> None:
        self.model = model
        self.supports_schemas = True
        self.tokens_left = model.session_tokens
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return mask_secrets(self.model.url)

    def list_models(self) -> list[str]:
        """Return the names of the endpoint's models. Raises EndpointError."""
        try:
            listed = json.loads(Conversation(self).send_request("GET", "/models"))
            return [str(each["id"]) for each in listed["data"]]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise EndpointError(f"the list of models cannot be read: {type(error).__name__}") from None

    def spend_tokens(self, tokens: int) -> None:
        with self._lock:
            self.tokens_left = max(0, self.tokens_left - tokens)

    def ask(self, instruction: str, question: str, *, schema: Mapping[str, object]) -> dict[str, object]:
        """Return the JSON object that answers one question. Raises EndpointError."""
        messages = [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
        answer = parse_first_json_object(Conversation(self).ask(messages, schema=schema))
        if answer is None:
            raise EndpointError("the answer is not a JSON object")
        return answer


class Conversation:
    """Questions that share a time limit and a token budget. Needs `httpx`."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self.tokens = 0
        self._endpoint = endpoint
        self._model = endpoint.model
        self._ends_at = time.monotonic() + float(endpoint.model.time_limit_s)
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError:
            raise EndpointError("httpx is not installed: pip install httpx") from None

    def ask(self, messages: Messages, *, schema: Mapping[str, object] | None = None) -> str:
        """Return the model's answer. If the endpoint supports schemas, the answer matches `schema`. Raises
        EndpointError.
        """
        asked = sum(len(message["content"]) for message in messages) // _CHARACTERS_A_TOKEN
        most = min(_MOST_ANSWER_TOKENS, self._answer_token_limit(asked))
        sent = [{**message, "content": mask_secrets(message["content"])} for message in messages]
        body = {"model": self._model.model, "messages": sent, "temperature": 0, "max_tokens": most}
        try:
            answer = json.loads(self._request_completion(body, schema))
            text = answer["choices"][0]["message"]["content"]
            counted = (answer.get("usage") or {}).get("total_tokens", 0)
        except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(f"the answer is not a chat completion: {type(error).__name__}") from None
        if not isinstance(text, str):
            raise EndpointError("the answer has no text")
        told = counted if isinstance(counted, int) and not isinstance(counted, bool) else 0
        spent = max(told, asked + len(text) // _CHARACTERS_A_TOKEN)
        self.tokens += spent
        self._endpoint.spend_tokens(spent)
        if self.tokens > self._model.tokens:
            raise EndpointError(f"the budget of {self._model.tokens:,} tokens is spent: {self.tokens:,} were used")
        return text

    def _answer_token_limit(self, asked: int) -> int:
        room, of_session = self._model.tokens - self.tokens - asked, self._endpoint.tokens_left - asked
        if room <= 0:
            raise EndpointError(f"the budget of {self._model.tokens:,} tokens is spent")
        if of_session <= 0:
            raise EndpointError(f"the session's budget of {self._model.session_tokens:,} tokens is spent")
        return min(room, of_session)

    def _request_completion(self, body: dict[str, Any], schema: Mapping[str, object] | None) -> bytes:
        if schema is None:
            return self.send_request("POST", _CHAT, {**body, "stop": ["Observation:"]})
        if self._endpoint.supports_schemas:
            forced = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            try:
                return self.send_request("POST", _CHAT, {**body, "response_format": forced})
            except EndpointError as error:
                if error.status not in _SCHEMA_REFUSALS:
                    raise
                self._endpoint.supports_schemas = False
        return self.send_request("POST", _CHAT, body)

    def send_request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the body of the response. Raises EndpointError, also when the time limit has passed."""
        httpx, url = self._httpx, self._model.url.rstrip("/")
        left_s = self._remaining_s()
        key = os.environ.get(self._model.key_variable, "") if self._model.key_variable else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        options = {
            "timeout": httpx.Timeout(left_s, connect=min(_CONNECT_S, left_s)),
            "trust_env": not _is_loopback(url),  # no proxy for an endpoint on this machine
            "verify": url.startswith("https"),
        }
        data = bytearray()
        try:
            with (
                httpx.Client(**options) as client,
                client.stream(method, url + path, json=body, headers=headers) as response,
            ):
                if response.status_code != 200:
                    raise EndpointError(
                        f"the endpoint answered with status {response.status_code}", status=response.status_code
                    )
                for piece in response.iter_bytes():
                    data += piece
                    self._remaining_s()  # raises after the time limit: HTTPX limits only the wait for the next bytes
                    if len(data) > MOST_ANSWER_BYTES:
                        raise EndpointError(f"the answer is longer than {MOST_ANSWER_BYTES:,} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            raise EndpointError(f"{type(error).__name__}: {str(error)[:200]}") from None
        return bytes(data)

    def _remaining_s(self) -> float:
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise EndpointError(f"the time limit of {self._model.time_limit_s:g} s has passed")
        return left


def parse_first_json_object(text: str) -> dict[str, object] | None:
    """Return the JSON object that starts at the first brace in a text; None if it is not valid."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
