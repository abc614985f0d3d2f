"""Latency objectives of requests, and the token counts that the session's policy needs.

A policy that honours a time to first token, such as `slinfer`, admits requests itself. The expected length of an answer
is the mean of the model's last answers, at most the request's limit (SLINFER §VII-A).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.models_file import LONGEST_OBJECTIVE_S
from stoker.apps.common.openai_requests import ApiRequest, field_error
from stoker.apps.gateway.failures import log
from stoker.contexts import token_counter
from stoker.errors import ConfigError, RecipeError
from stoker.units import parse_seconds

HEADERS = {"stoker-ttft": "ttft", "stoker-tpot": "tpot"}
"""Request headers, and the call option that each sets."""
_COUNTED = 20_000
"""Maximum number of characters of a prompt that are tokenized. The count of a longer prompt is extrapolated."""
_AT_ONCE = 2_000
"""Maximum number of characters that are tokenized in the event loop's thread."""
TOKEN_CHARACTERS = 4
"""Assumed characters per token without a tokenizer."""
_MESSAGE_TOKENS = 4
"""Assumed tokens that a chat template adds per message."""
_REMEMBERED = 256


class LatencyObjectives(msgspec.Struct, frozen=True):
    """Latency objectives: maximum seconds to the first token, and per further token; 0 = no objective."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def token_due_s(self, token: int, *, ttft_s: float) -> float:
        """Return when a token is due, in seconds after the request (SLINFER eq. 1). `token`: index, 0 for the first."""
        return (self.ttft_s or ttft_s) + token * self.tpot_s

    def check_stream(self, *, ttft_s: float, late: bool | None, failed: bool) -> dict[str, bool]:
        """Return by objective whether a stream met it. `late`: True if a token after the first was late; None if there
        was one token only.
        """
        found: dict[str, bool] = {}
        if self.ttft_s:
            found["ttft"] = ttft_s <= self.ttft_s and not failed
        if self.tpot_s and late is not None:
            found["tpot"] = not late and not failed
        return found


class RequestLengths:
    """Token counts of a model's prompts and answers."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._count: Callable[[str], int] | None = token_counter(path)
        """Counts the tokens of a text; None if the model's tokenizer cannot be read on this machine."""
        self._is_read = False
        self._answers: deque[int] = deque(maxlen=_REMEMBERED)

    async def make_features(self, request: ApiRequest) -> dict[str, int]:
        """Return the `features` of a request's calls. `input_length` is the length of the longest prompt in tokens."""
        text = "\n".join(request.input_texts) if request.messages else max(request.texts, key=len, default="")
        tokens = await self._count_tokens(text) + _MESSAGE_TOKENS * len(request.messages)
        tokens = max([tokens, *map(len, request.ids)])
        most = request.sampling.max_new_tokens if request.sampling.writes else 1
        return {
            "input_length": max(1, tokens),
            "expected_output": self.estimate_answer_tokens(most),
            "most_output": most,
        }

    def record_answer_length(self, tokens: int) -> None:
        self._answers.append(tokens)

    def estimate_answer_tokens(self, most: int | None) -> int:
        """Return the expected tokens of an answer; 0 = unknown."""
        mean = round(sum(self._answers) / len(self._answers)) if self._answers else 0
        return min(mean or most or 0, most) if most else mean

    async def _count_tokens(self, text: str) -> int:
        if self._count is None:
            return len(text) // TOKEN_CHARACTERS
        counted = text[:_COUNTED]
        try:
            if self._is_read and len(counted) <= _AT_ONCE:
                tokens = self._count(counted)
            else:
                tokens = await asyncio.to_thread(self._count_with_tokenizer, self._count, counted)
        except RecipeError as error:
            if self._count is not None:  # log the error only for the first request
                said = "%s; the lengths of its prompts are estimated at %d characters per token"
                log.warning(said, error, TOKEN_CHARACTERS)
            self._count = None
            return len(text) // TOKEN_CHARACTERS
        self._is_read = True
        return tokens * len(text) // len(counted) if counted else 0

    def _count_with_tokenizer(self, count: Callable[[str], int], text: str) -> int:
        if not self._is_read and not Path(self._path).exists():  # a request must not wait for a download
            raise RecipeError(f"{self._path} has no tokenizer on this machine")
        return count(text)


def refuse_objectives(headers: Mapping[str, str]) -> None:
    """Raise RequestRefused if the headers of a batch request set objectives."""
    for header in HEADERS:
        if header in headers:
            raise field_error(header, "is for requests that are answered at once, not for a batch", "unsupported_value")


def read_objective_headers(
    headers: Mapping[str, str], *, honoured: frozenset[str], writes: bool = True
) -> dict[str, float]:
    """Return objectives in seconds by option. `writes`: True if the model generates text. Raises RequestRefused."""
    found: dict[str, float] = {}
    for header, option in HEADERS.items():
        value: Any = headers.get(header)
        if value is None:
            continue
        if option == "tpot" and not writes:
            raise field_error(header, "is for models that generate text, not for embedding models", "unsupported_value")
        if option == "tpot" and "tpot_s" not in honoured:  # the gateway checks the time to first token under any policy
            raise field_error(header, "needs a session whose policy honours it, such as slinfer", "unsupported_value")
        try:
            seconds = parse_seconds(value)
        except (ConfigError, OverflowError):
            seconds = 0.0
        if not 0 < seconds <= LONGEST_OBJECTIVE_S:
            raise field_error(header, 'must be a time such as "500 ms", more than 0 and at most a day', "invalid_value")
        found[option] = round(seconds, 3) or 0.001
    return found
