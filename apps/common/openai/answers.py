"""OpenAI's forms: the bodies of answers. `name` tells an answer from all others."""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Sequence
from typing import Any

from stoker.apps.common.openai.writing import Choice, Likelihoods

Body = dict[str, Any]
_LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


def chat_body(choices: Sequence[Choice], *, name: str, model: str, created: int, usage: Body | None = None) -> Body:
    """The answer to a conversation: a message a choice. `usage`: other than the sum of the choices'."""
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage or usage_of(choices),
        "system_fingerprint": None,
    }


def completion_body(
    choices: Sequence[Choice], *, name: str, model: str, created: int, usage: Body | None = None
) -> Body:
    """The answer to a completion: a text a choice. `usage`: other than the sum of the choices'."""
    return {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": completion_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage or usage_of(choices),
        "system_fingerprint": None,
    }


def embedding_body(vectors: Sequence[Sequence[float]], *, model: str, tokens: int, packed: bool) -> Body:
    """The vectors of texts, which have `tokens` tokens in all; `packed`: as base64."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if packed else vector}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def chat_logprobs(likelihoods: Likelihoods | None) -> Body | None:
    """Likelihoods as a conversation's answer has them."""
    if likelihoods is None:
        return None
    return {
        "content": [
            {**_chance(token, chance), "top_logprobs": [_chance(*one) for one in likeliest]}
            for token, chance, likeliest in likelihoods
        ],
        "refusal": None,
    }


def completion_logprobs(likelihoods: Likelihoods | None, *, offset: int = 0) -> Body | None:
    """Likelihoods as a completion's answer has them. `offset`: the characters of the text before them."""
    if likelihoods is None:
        return None
    ends = itertools.accumulate((len(token) for token, _, _ in likelihoods), initial=offset)
    return {
        "tokens": [token for token, _, _ in likelihoods],
        "token_logprobs": [max(_LEAST_LOGPROB, chance) for _, chance, _ in likelihoods],
        "top_logprobs": [
            {token: max(_LEAST_LOGPROB, chance) for token, chance in likeliest} for _, _, likeliest in likelihoods
        ],
        "text_offset": list(ends)[: len(likelihoods)],
    }


def usage_of(choices: Sequence[Choice]) -> Body:
    """The tokens of choices, each of which has read a prompt of its own."""
    read = sum(choice.prompt_tokens for choice in choices)
    return token_usage(read, sum(choice.completion_tokens for choice in choices))


def token_usage(read: int, written: int) -> Body:
    """Tokens read and written."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _chance(token: str, chance: float) -> Body:
    return {"token": token, "logprob": max(_LEAST_LOGPROB, chance), "bytes": list(token.encode())}


def _packed(vector: Sequence[float]) -> str:
    """Little-endian float32 in base64, as OpenAI's."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
