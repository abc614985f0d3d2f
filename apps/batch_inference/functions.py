"""The functions of this application that run on a pilot, with the built-in contexts `causal_lm` and `encoder`.

    answered = answer.with_options(context=causal_lm("models/small"))
    embedded = embed.with_options(context=encoder("models/e5"))

`run.py` makes a recipe for each model. The first argument of each function is the loaded model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stoker import app
from stoker.apps.common.openai_answers import (
    Choice,
    Vectors,
    build_prompts,
    complete_prompt,
    convert_model_error,
    embed_request_texts,
    set_request_adapter,
)
from stoker.apps.common.openai_requests import ApiError, ApiRequest, Endpoint

if TYPE_CHECKING:
    from stoker.contexts import CausalLM, EncoderModel


class BatchAnswer(msgspec.Struct, frozen=True):
    """The answer to a request: choices (one per prompt), vectors, or an error. `ended_at`: seconds since the epoch."""

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
    def token_count(self) -> int:
        texts = sum(choice.prompt_tokens + choice.completion_tokens for choice in self.choices)
        return self.embedding_token_count + texts

    @property
    def embedding_token_count(self) -> int:
        return self.vectors.tokens if self.vectors is not None else 0


@app
def answer(model: CausalLM, request: ApiRequest) -> BatchAnswer:
    """Answer one request. If the model refuses it, return an answer with the error."""
    begun, request = time.perf_counter(), set_request_adapter(model, request)
    try:
        prompts = enumerate(build_prompts(model, request))
        choices = [complete_prompt(model, request, prompt, place=place) for place, prompt in prompts]
    except ValueError as refused:
        return _make_answer(request, begun, refused=refused)
    return _make_answer(request, begun, choices=choices)


@app
def embed(model: EncoderModel, request: ApiRequest) -> BatchAnswer:
    begun = time.perf_counter()
    try:
        found, tokens = embed_request_texts(model, request)
    except ValueError as refused:
        return _make_answer(request, begun, refused=refused)
    data = found.astype("<f4", copy=False).tobytes()
    return _make_answer(request, begun, vectors=Vectors(found.shape[1], tokens, data))


def _make_answer(
    request: ApiRequest, begun: float, *, refused: ValueError | None = None, choices: Sequence[Choice] = (),
    vectors: Vectors | None = None,
) -> BatchAnswer:  # fmt: skip
    error = None
    if refused is not None:
        error = convert_model_error(refused, request)
        error = msgspec.structs.replace(error, message=f"line {request.line}: {error.message}")
    return BatchAnswer(
        custom_id=request.custom_id, line=request.line, endpoint=request.endpoint, model=request.model,
        choices=list(choices), error=error, ended_at=time.time(), infer_s=time.perf_counter() - begun, vectors=vectors,
        packed=request.packed,
    )  # fmt: skip
