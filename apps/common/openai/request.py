"""A request that can be answered, and an error as OpenAI words it."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Endpoint(enum.Enum):
    """What a request asks for; the value is its `url`."""

    CHAT = "/v1/chat/completions"
    """The next message of a conversation."""
    COMPLETIONS = "/v1/completions"
    """What comes after a text."""
    EMBEDDINGS = "/v1/embeddings"
    """A vector for each text."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation. `role`: system, user or assistant; `name`: whose message it is, for chat templates
    that say so."""

    role: str
    content: str
    name: str = ""


class SamplingOptions(msgspec.Struct, frozen=True):
    """How the next token is chosen, and when the text ends. `max_new_tokens` 0: the model writes until it has no room.

    `logprobs`: the answer has the log-probability of each chosen token, and of this number of the likeliest tokens at
    its place; -1: it has no log-probabilities. `json_schema`: the text satisfies this schema; empty: any text will do.
    `engine_options`: what only some engines can do, by vLLM's names.
    """

    max_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int = -1
    json_schema: str = ""
    engine_options: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """The names of what only some engines can do."""
        return (*(["json_schema"] if self.json_schema else []), *(name for name, _ in self.engine_options))


class ApiRequest(msgspec.Struct, frozen=True):
    """One request, checked. `line` is where in its file it stands; 0: it comes from no file.

    A conversation has `messages`; the other endpoints have `texts`, and an answer to each. `packed`: vectors are wanted
    as base64. `dimensions`: the numbers of a vector that are expected; 0: as many as the model gives.
    """

    custom_id: str
    line: int
    endpoint: Endpoint
    model: str
    messages: tuple[ChatMessage, ...] = ()
    texts: tuple[str, ...] = ()
    sampling: SamplingOptions = SamplingOptions()
    packed: bool = False
    dimensions: int = 0


class ApiError(msgspec.Struct, frozen=True):
    """Why a request has no answer, in OpenAI's words. `param` names the field, from the body's beginning."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    status: int = 400

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """As the body of a response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class RequestRefused(Exception):
    """A request cannot be answered. `error` says why."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400,
        type: str = "invalid_request_error",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.error = ApiError(message, type=type, param=param, code=code, status=status)
