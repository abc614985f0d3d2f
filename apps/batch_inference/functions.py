"""The functions of this application that run on a pilot. Their contexts are ready-made ones.

    answered = answer.with_options(context=causal_lm("models/small"))
    embedded = embed.with_options(context=encoder("models/e5"))

A batch makes a recipe of each of its models and maps `answer` or `embed` over its requests: `run.py` does so. A call is
one request. The functions get the loaded model as their first argument.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from stoker import app
from stoker.apps.common.openai_answers import (
    Choice,
    Vectors,
    complete,
    embed_texts,
    prompts_of,
    refusal,
)
from stoker.apps.common.openai_requests import ApiError, ApiRequest, Endpoint

if TYPE_CHECKING:
    from stoker.contexts import CausalLM, EncoderModel


class BatchAnswer(msgspec.Struct, frozen=True):
    """The result of a call: a choice a prompt or a vector a text, or the error; when it ended (epoch) and how long it
    took. `packed` is the request's."""

    custom_id: str
    line: int
    endpoint: Endpoint
    model: str
    choices: list[Choice]
    error: ApiError | None
    ended_at: float
    infer_s: float
    vectors: Vectors | None = None
    packed: bool = False

    @property
    def tokens(self) -> int:
        """All tokens that were read and written."""
        return self.read_tokens + sum(choice.prompt_tokens + choice.completion_tokens for choice in self.choices)

    @property
    def read_tokens(self) -> int:
        """Tokens of texts that have vectors."""
        return self.vectors.tokens if self.vectors is not None else 0


@app
def answer(model: CausalLM, request: ApiRequest) -> BatchAnswer:
    """Has the model answer one request. What the model refuses is an answer too; nothing else is caught here."""
    begun = time.perf_counter()
    choices: list[Choice] = []
    error: ApiError | None = None
    try:
        for place, prompt in enumerate(prompts_of(model, request)):
            choices.append(complete(model, prompt, request.sampling, place=place))
    except ValueError as refused:
        choices, error = [], _refusal(refused, request)
    return BatchAnswer(
        custom_id=request.custom_id,
        line=request.line,
        endpoint=request.endpoint,
        model=request.model,
        choices=choices,
        error=error,
        ended_at=time.time(),
        infer_s=time.perf_counter() - begun,
    )


@app
def embed(model: EncoderModel, request: ApiRequest) -> BatchAnswer:
    """Has the model embed the texts of one request."""
    begun = time.perf_counter()
    vectors: Vectors | None = None
    error: ApiError | None = None
    try:
        found, tokens = embed_texts(model, request)
        vectors = Vectors(found.shape[1], tokens, found.astype("<f4", copy=False).tobytes())
    except ValueError as refused:
        error = _refusal(refused, request)
    return BatchAnswer(
        custom_id=request.custom_id,
        line=request.line,
        endpoint=request.endpoint,
        model=request.model,
        choices=[],
        error=error,
        ended_at=time.time(),
        infer_s=time.perf_counter() - begun,
        vectors=vectors,
        packed=request.packed,
    )


def _refusal(error: ValueError, request: ApiRequest) -> ApiError:
    said = refusal(error, request.endpoint)
    return msgspec.structs.replace(said, message=f"line {request.line}: {said.message}")
