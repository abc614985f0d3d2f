"""The function of this application that runs on a pilot. Its context is a ready-made one: `causal_lm(path)`.

    written = generate.with_options(context=causal_lm("models/small", dtype="bfloat16"))

A sweep makes a recipe of each of its models and maps `generate` over each: `run.py` does so. The function gets the
loaded model as its first argument.
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
    """One call's work: texts that share their generation parameters.

    `tensor_batch`: the most texts that the engine writes at the same time; 0 = the engine decides. `seeds` has one seed
    for each text, so that a row's text does not depend on the call that it is in.
    """

    number: int
    texts: tuple[str, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    chat: bool = False
    tensor_batch: int = 0


class WrittenTexts(msgspec.Struct, frozen=True):
    """What a call brings back: a text a prompt, when it began (epoch), how long it took.

    `errors` has one a text: why the model cannot take the prompt; empty where it wrote.
    """

    number: int
    texts: list[str]
    started_at: float
    infer_s: float
    worker: str
    errors: list[str]


@app
def generate(model: CausalLM, request: Request) -> WrittenTexts:
    """Has the model write. Only the inference is timed. A prompt that the model cannot take costs no other its text."""
    started_at, begun = time.time(), time.perf_counter()
    texts: list[str] = []
    errors: list[str] = []
    try:
        texts = _write(model, request, request.texts, seeds=request.seeds)
        errors = [""] * len(texts)
    except ValueError:
        # The model refuses a call for one of its prompts, before it writes: which one, each alone tells.
        for text, seed in zip(request.texts, request.seeds, strict=True):
            written, error = _try_alone(model, request, text, seed=seed)
            texts.append(written)
            errors.append(error)
    infer_s = time.perf_counter() - begun
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return WrittenTexts(
        number=request.number, texts=texts, started_at=started_at, infer_s=infer_s, worker=worker, errors=errors
    )


def _try_alone(model: CausalLM, request: Request, text: str, *, seed: int) -> tuple[str, str]:
    """What the model writes, and why it cannot; one of the two is empty."""
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
