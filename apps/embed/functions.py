"""The function of this application that runs on a pilot, with the built-in context `encoder(path)`.

vectors = embed_texts.with_options(context=encoder("models/small"))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stoker import app

if TYPE_CHECKING:
    from stoker.contexts import EncoderModel


class EmbedRequest(msgspec.Struct, frozen=True):
    """The texts that one call embeds. `tensor_batch`: maximum number of texts per tensor."""

    number: int
    texts: tuple[str, ...]
    pooling: str = ""
    normalize: bool = True
    truncate: bool = False
    tensor_batch: int = 32


class EmbeddedTexts(msgspec.Struct, frozen=True):
    """The result of a call. `vectors`: little-endian float32 bytes per text, empty for a text with an error in
    `errors`."""

    number: int
    vectors: list[bytes]
    errors: list[str]
    tokens: int
    infer_s: float


@app
def embed_texts(model: EncoderModel, request: EmbedRequest) -> EmbeddedTexts:
    """Embed texts. If the model refuses a text, the other texts still get vectors."""
    begun = time.perf_counter()
    # Leave out empty texts: some tokenizers add tokens to an empty text, which would then get a vector.
    there = [text for text in request.texts if text]
    try:
        vectors, tokens = _embed_texts_as_bytes(model, request, there) if there else ([], 0)
        errors = [""] * len(vectors)
    except ValueError:
        vectors, errors, tokens = _one_by_one(model, request, there)
    found = iter(zip(vectors, errors, strict=True))
    pairs = [next(found) if text else (b"", "the row has no text") for text in request.texts]
    return EmbeddedTexts(
        request.number, [vector for vector, _ in pairs], [error for _, error in pairs], tokens,
        time.perf_counter() - begun,
    )  # fmt: skip


def _one_by_one(model: EncoderModel, request: EmbedRequest, texts: Sequence[str]) -> tuple[list[bytes], list[str], int]:
    """Embed texts one at a time, to find the texts that the model refuses."""
    vectors, errors, tokens = [], [], 0
    for text in texts:
        try:
            [vector], count = _embed_texts_as_bytes(model, request, (text,))
        except ValueError as error:
            vector, count = b"", 0
            said = str(error).replace("text 0 ", "the text ", 1)
            errors.append(said.replace("truncate=True", "--truncate") or type(error).__name__)
        else:
            errors.append("")
        vectors.append(vector)
        tokens += count
    return vectors, errors, tokens


def _embed_texts_as_bytes(model: EncoderModel, request: EmbedRequest, texts: Sequence[str]) -> tuple[list[bytes], int]:
    found, tokens = model.embed_array(
        list(texts), pooling=request.pooling, normalize=request.normalize, batch_size=request.tensor_batch,
        truncate=request.truncate,
    )  # fmt: skip
    return [row.astype("<f4").tobytes() for row in found], tokens
