"""The functions of the gateway that run on a pilot. A call answers one choice of a request, or embeds all its texts.

Each gives pieces: what it has to say, or an ApiError where the model refuses. What else goes wrong is raised.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from stoker import app
from stoker.apps.common.openai.request import ApiError, ApiRequest
from stoker.apps.common.openai.writing import (
    Choice,
    Embedder,
    TextModel,
    TextPiece,
    complete,
    embed_texts,
    prompts_of,
    refusal,
    stream_text,
)


class Vectors(msgspec.Struct, frozen=True):
    """The vector of each text, and the tokens of all texts."""

    vectors: list[list[float]]
    tokens: int


@app(stream=True)
def write(model: TextModel, request: ApiRequest) -> Iterator[Choice | ApiError]:
    """The whole text of one choice."""
    try:
        [prompt] = prompts_of(model, request)
        yield complete(model, prompt, request.sampling, place=0)
    except ValueError as refused:
        yield refusal(refused, request.endpoint)


@app(stream=True)
def write_pieces(model: TextModel, request: ApiRequest) -> Iterator[TextPiece | ApiError]:
    """The text of one choice, as it is written."""
    begun = False
    try:
        [prompt] = prompts_of(model, request)
        for piece in stream_text(model, prompt, request.sampling, place=0):
            yield piece
            begun = True
    except ValueError as refused:
        if begun:
            raise
        yield refusal(refused, request.endpoint)


@app(stream=True)
def embed(model: Embedder, request: ApiRequest) -> Iterator[Vectors | ApiError]:
    """The vectors of all texts of a request."""
    try:
        yield Vectors(*embed_texts(model, request.texts))
    except ValueError as refused:
        yield refusal(refused, request.endpoint)
