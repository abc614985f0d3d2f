"""Convert log-probabilities of tokens to OpenAI's formats for conversations and completions."""

from __future__ import annotations

import itertools
from typing import Any

Likelihoods = tuple[tuple[str, float | None, tuple[tuple[str, float], ...]], ...]
"""Per token: text, log-probability (None: first of a prompt), and the likeliest tokens with theirs."""
Body = dict[str, Any]
_LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no infinity."""


def chat_logprobs(likelihoods: Likelihoods | None) -> Body | None:
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
    """`offset`: number of characters before the first token."""
    if likelihoods is None:
        return None
    ends = itertools.accumulate((len(token) for token, _, _ in likelihoods), initial=offset)
    return {
        "tokens": [_named(token) for token, _, _ in likelihoods],
        "token_logprobs": [_clamp_logprob_for_json(chance) for _, chance, _ in likelihoods],
        "top_logprobs": [
            None if own is None else {_named(token): _clamp_logprob_for_json(chance) for token, chance in likeliest}
            for _, own, likeliest in likelihoods
        ],
        "text_offset": [max(0, end) for end in ends][: len(likelihoods)],
    }


def _clamp_logprob_for_json(chance: float | None) -> float | None:
    return None if chance is None else max(_LEAST_LOGPROB, chance)


def _chance(token: str, chance: float | None) -> Body:
    return {"token": str(token), "logprob": _clamp_logprob_for_json(chance), "bytes": list(_bytes_of(token))}


def _bytes_of(token: str) -> bytes:
    raw: bytes = getattr(token, "raw", None) or token.encode()
    return raw


def _named(token: str) -> str:
    """Return a token as text, or in OpenAI's `bytes:` notation for a part of a character."""
    raw = getattr(token, "raw", None)
    return str(token) if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
