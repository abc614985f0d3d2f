"""The functions of the gateway that run on a pilot.

A call answers one choice of a request, or embeds or scores all its texts. The call yields pieces of the answer, or an
ApiError if the model refuses the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker import app
from stoker.apps.common.openai_answers import (
    Choice,
    ScorePiece,
    TextPiece,
    Vectors,
    build_prompts,
    complete_prompt,
    convert_model_error,
    embed_request_texts,
    score_text_pairs,
    set_request_adapter,
    stream_text,
)
from stoker.apps.common.openai_requests import ApiError, ApiRequest

if TYPE_CHECKING:
    from stoker.contexts import CausalLM, EncoderModel, RelayedTexts

_PIECE_BYTES = 500_000
"""Target size of a piece with vectors. A piece may have up to 1 MB."""


@app(stream=True)
def write_answer(model: CausalLM, request: ApiRequest) -> Iterator[Choice | ApiError]:
    request = set_request_adapter(model, request)
    try:
        [prompt] = build_prompts(model, request)
        yield complete_prompt(model, request, prompt, place=0)
    except ValueError as refused:
        yield convert_model_error(refused, request)


@app(stream=True)
def stream_answer(model: CausalLM, request: ApiRequest) -> Iterator[TextPiece | RelayedTexts | ApiError]:
    begun, request = False, set_request_adapter(model, request)
    try:
        [prompt] = build_prompts(model, request)
        for piece in stream_text(model, request, prompt, place=0):
            yield piece
            begun = True
    except ValueError as refused:
        if begun:
            raise
        yield convert_model_error(refused, request)


@app(stream=True)
def embed_texts(model: EncoderModel, request: ApiRequest) -> Iterator[Vectors | ApiError]:
    try:
        vectors, tokens = embed_request_texts(model, request)
    except ValueError as refused:
        yield convert_model_error(refused, request)
        return
    width = vectors.shape[1]
    rows = max(1, _PIECE_BYTES // max(1, 4 * width))
    for start in range(0, len(vectors), rows):
        yield Vectors(width, tokens, vectors[start : start + rows].astype("<f4", copy=False).tobytes())


@app(stream=True)
def score_pairs(model: EncoderModel, request: ApiRequest) -> Iterator[ScorePiece | ApiError]:
    try:
        yield score_text_pairs(model, request)
    except ValueError as refused:
        yield convert_model_error(refused, request)
