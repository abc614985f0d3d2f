"""The function of this application that runs on a pilot, with the built-in context `encoder(path)`.

vectors = embed_texts.with_options(context=encoder("models/small"))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stoker import app
from stoker.apps.common.calls import run_collecting_errors

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
    """`vectors`: little-endian float32 bytes per text, empty for a text with an error in `errors`."""

    number: int
    vectors: list[bytes]
    errors: list[str]
    tokens: int
    infer_s: float


@app
def embed_texts(model: EncoderModel, request: EmbedRequest) -> EmbeddedTexts:
    """Embed texts. If the model refuses a text, the other texts still get vectors."""
    begun, tokens = time.perf_counter(), 0

    def embed(texts: Sequence[str]) -> list[bytes]:
        nonlocal tokens
        found, count = model.embed_array(
            list(texts), pooling=request.pooling, normalize=request.normalize, batch_size=request.tensor_batch,
            truncate=request.truncate,
        )  # fmt: skip
        tokens += count
        return [row.astype("<f4").tobytes() for row in found]

    # Leave out empty texts: some tokenizers add tokens to an empty text, which would then get a vector.
    there = [text for text in request.texts if text]
    results = zip(*run_collecting_errors(embed, there), strict=True) if there else iter(())
    vectors, errors = [], []
    for text in request.texts:
        vector, error = next(results) if text else (None, "the row has no text")
        vectors.append(vector or b"")
        errors.append(error.replace("text 0 ", "the text ", 1).replace("truncate=True", "--truncate"))
    return EmbeddedTexts(request.number, vectors, errors, tokens, time.perf_counter() - begun)
