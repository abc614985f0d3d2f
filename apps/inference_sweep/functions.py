"""The function of this application that runs on a pilot, with the built-in context `causal_lm(path)`.

    written = generate.with_options(context=causal_lm("models/small", dtype="bfloat16"))

`run.py` makes a recipe for each model. The first argument of the function is the loaded model.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stoker import app

if TYPE_CHECKING:
    from stoker.contexts import CausalLM


class Request(msgspec.Struct, frozen=True):
    """The input of one call: prompt texts with the same generation parameters.

    `tensor_batch`: maximum number of texts that the engine generates in one batch, 0 = the engine decides; `seeds`: one
    seed per text, so that the result of a row does not depend on the other rows of its call.
    """

    number: int
    texts: tuple[str, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    chat: bool = False
    tensor_batch: int = 0


class WrittenTexts(msgspec.Struct, frozen=True):
    """The result of a call: a text per prompt, the start of the call (seconds since the epoch), and the duration.

    `errors`: one text per prompt that says why the model refuses the prompt, or is empty for a generated text.
    """

    number: int
    texts: list[str]
    started_at: float
    infer_s: float
    worker: str
    errors: list[str]


@app
def generate(model: CausalLM, request: Request) -> WrittenTexts:
    """Generate texts. The returned time includes only inference. If the model refuses a prompt, the other prompts still
    get texts.
    """
    started_at, begun = time.time(), time.perf_counter()
    texts: list[str] = []
    errors: list[str] = []
    try:
        texts = _write(model, request, request.texts, seeds=request.seeds)
        errors = [""] * len(texts)
    except ValueError:
        # The model refuses the whole call because of one prompt. Run each prompt alone to find the bad prompt.
        for text, seed in zip(request.texts, request.seeds, strict=True):
            written, error = _generate_alone(model, request, text, seed=seed)
            texts.append(written)
            errors.append(error)
    infer_s = time.perf_counter() - begun
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return WrittenTexts(
        number=request.number, texts=texts, started_at=started_at, infer_s=infer_s, worker=worker, errors=errors
    )


def _generate_alone(model: CausalLM, request: Request, text: str, *, seed: int) -> tuple[str, str]:
    """Return the generated text and the model's error. One of the two is empty."""
    try:
        return _write(model, request, (text,), seeds=(seed,))[0], ""
    except ValueError as error:
        reason = str(error) or type(error).__name__
        return "", reason.replace("prompt 0 ", "the prompt ", 1)


def _write(model: CausalLM, request: Request, texts: Sequence[str], *, seeds: Sequence[int]) -> list[str]:
    return model.generate(
        [model.chat(text) for text in texts] if request.chat else list(texts),
        max_new_tokens=request.max_new_tokens,
        batch_size=request.tensor_batch,
        temperature=request.temperature,
        seed=seeds,
    )
