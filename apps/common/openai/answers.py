"""OpenAI's forms: the bodies of answers. `name` tells an answer from all others."""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stoker.apps.common.openai.writing import Choice, Likelihoods

Body = dict[str, Any]
_FLOAT_BYTES = 4
_PART_BYTES = 250_000
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


def embedding_body(vectors: Vectors, *, model: str, packed: bool) -> Body:
    """The vectors of texts; `packed`: as base64."""
    return {
        "object": "list",
        "data": [_embedding(index, vector, packed) for index, vector in enumerate(vectors)],
        **_embedding_facts(vectors, model),
    }


def embedding_parts(vectors: Vectors, *, model: str, packed: bool) -> Iterator[bytes]:
    """The same as JSON in parts of `_PART_BYTES` and a vector more: the whole may have hundreds of megabytes."""
    encode = msgspec.json.encode
    part = bytearray(b'{"object":"list","data":[')
    for index, vector in enumerate(vectors):
        part += (b"," if index else b"") + encode(_embedding(index, vector, packed))
        if len(part) > _PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + b"]," + encode(_embedding_facts(vectors, model))[1:]


class Vectors(msgspec.Struct, frozen=True):
    """The vectors of texts, which have `tokens` tokens in all: `width` float32 numbers each, little-endian, one after
    the other."""

    width: int
    tokens: int
    data: bytes | bytearray

    def __iter__(self) -> Iterator[bytes]:
        """The bytes of each vector."""
        size = self.width * _FLOAT_BYTES
        return (bytes(self.data[start : start + size]) for start in range(0, len(self.data), size))


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
        "tokens": [_named(token) for token, _, _ in likelihoods],
        "token_logprobs": [max(_LEAST_LOGPROB, chance) for _, chance, _ in likelihoods],
        "top_logprobs": [
            {_named(token): max(_LEAST_LOGPROB, chance) for token, chance in likeliest}
            for _, _, likeliest in likelihoods
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
    return {"token": str(token), "logprob": max(_LEAST_LOGPROB, chance), "bytes": list(_bytes_of(token))}


def _bytes_of(token: str) -> bytes:
    """The bytes of a token, which may be part of a character."""
    raw: bytes = getattr(token, "raw", None) or token.encode()
    return raw


def _named(token: str) -> str:
    """A token in a list of texts; one that is part of a character as its bytes, as OpenAI writes them."""
    raw = getattr(token, "raw", None)
    return str(token) if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _embedding(index: int, vector: bytes, packed: bool) -> Body:
    """One vector: little-endian float32 in base64, as OpenAI's, or numbers."""
    numbers = base64.b64encode(vector).decode() if packed else struct.unpack(f"<{len(vector) // _FLOAT_BYTES}f", vector)
    return {"object": "embedding", "index": index, "embedding": numbers}


def _embedding_facts(vectors: Vectors, model: str) -> Body:
    """What stands behind the vectors."""
    return {"model": model, "usage": {"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens}}
