"""The lines of the output files, in OpenAI's form."""

from __future__ import annotations

import hashlib
from typing import Any, assert_never

from stoker.apps.batch_inference.functions import BatchAnswer
from stoker.apps.common.openai.answers import chat_body, completion_body, embedding_body
from stoker.apps.common.openai.request import ApiError, Endpoint

_DIGITS = 24


def answer_line(answer: BatchAnswer, *, digest: str) -> dict[str, Any]:
    """The line of a request that has come back, answered or refused by its model. `digest` is the request file's."""
    key = f"{digest} {answer.line}"
    if answer.error is not None:
        return error_line(answer.custom_id, answer.error, key=key)
    name, created = _name(key), int(answer.ended_at)
    match answer.endpoint:
        case Endpoint.CHAT:
            body = chat_body(answer.choices, name=name, model=answer.model, created=created)
        case Endpoint.COMPLETIONS:
            body = completion_body(answer.choices, name=name, model=answer.model, created=created)
        case Endpoint.EMBEDDINGS:
            assert answer.vectors is not None
            body = embedding_body(answer.vectors, model=answer.model, packed=answer.packed)
        case _:
            assert_never(answer.endpoint)
    return _line(answer.custom_id, name=name, status=200, body=body)


def error_line(custom_id: str | None, error: ApiError, *, key: str) -> dict[str, Any]:
    """The line of a request that has no answer. `key` tells it from all others."""
    return _line(custom_id, name=_name(key), status=error.status, body=error.body)


def _line(custom_id: str | None, *, name: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": None,
    }


def _name(key: str) -> str:
    """The same for the same request of the same file: a batch that runs again names its answers alike."""
    return hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]
