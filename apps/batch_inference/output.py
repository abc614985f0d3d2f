"""OpenAI's forms: the lines of the output files, and the bodies of answers."""

from __future__ import annotations

import base64
import hashlib
import itertools
import struct
from typing import Any, assert_never

from stoker.apps.batch_inference.functions import BatchAnswer, Choice, Likelihoods
from stoker.apps.batch_inference.request import ApiError, Endpoint

_DIGITS = 24
_LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


def answer_line(answer: BatchAnswer, *, digest: str) -> dict[str, Any]:
    """The line of a request that has come back, answered or refused by its model. `digest` is the request file's."""
    key = f"{digest} {answer.line}"
    if answer.error is not None:
        return error_line(answer.custom_id, answer.error, key=key)
    name = _name(key)
    facts = {"created": int(answer.ended_at), "model": answer.model}
    match answer.endpoint:
        case Endpoint.CHAT:
            body = _chat_body(name, facts, answer.choices)
        case Endpoint.COMPLETIONS:
            body = _completion_body(name, facts, answer.choices)
        case Endpoint.EMBEDDINGS:
            body = _embedding_body(answer)
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


def _chat_body(name: str, facts: dict[str, Any], choices: list[Choice]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        **facts,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": _chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(choices),
        "system_fingerprint": None,
    }


def _completion_body(name: str, facts: dict[str, Any], choices: list[Choice]) -> dict[str, Any]:
    return {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        **facts,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": _completion_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(choices),
        "system_fingerprint": None,
    }


def _chat_logprobs(likelihoods: Likelihoods | None) -> dict[str, Any] | None:
    if likelihoods is None:
        return None
    return {
        "content": [
            {**_chance(token, chance), "top_logprobs": [_chance(*one) for one in likeliest]}
            for token, chance, likeliest in likelihoods
        ],
        "refusal": None,
    }


def _chance(token: str, chance: float) -> dict[str, Any]:
    return {"token": token, "logprob": max(_LEAST_LOGPROB, chance), "bytes": list(token.encode())}


def _completion_logprobs(likelihoods: Likelihoods | None) -> dict[str, Any] | None:
    if likelihoods is None:
        return None
    ends = itertools.accumulate(len(token) for token, _, _ in likelihoods)
    return {
        "tokens": [token for token, _, _ in likelihoods],
        "token_logprobs": [max(_LEAST_LOGPROB, chance) for _, chance, _ in likelihoods],
        "top_logprobs": [
            {token: max(_LEAST_LOGPROB, chance) for token, chance in likeliest} for _, _, likeliest in likelihoods
        ],
        "text_offset": [0, *ends][: len(likelihoods)],
    }


def _embedding_body(answer: BatchAnswer) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if answer.packed else vector}
            for index, vector in enumerate(answer.vectors)
        ],
        "model": answer.model,
        "usage": {"prompt_tokens": answer.read_tokens, "total_tokens": answer.read_tokens},
    }


def _packed(vector: list[float]) -> str:
    """Little-endian float32 in base64, as OpenAI's."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _usage(choices: list[Choice]) -> dict[str, int]:
    read = sum(choice.prompt_tokens for choice in choices)
    written = sum(choice.completion_tokens for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _name(key: str) -> str:
    """The same for the same request of the same file: a batch that runs again names its answers alike."""
    return hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]
