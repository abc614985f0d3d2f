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
from stoker.apps.common.calls import run_collecting_errors

if TYPE_CHECKING:
    from stoker.contexts import CausalLM


class SweepRequest(msgspec.Struct, frozen=True):
    """Prompts, each with its own seed, so that its text does not depend on other rows. `tensor_batch`: prompts per
    tensor; 0 = the engine's default.
    """

    number: int
    texts: tuple[str, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    chat: bool = False
    tensor_batch: int = 0


class WrittenTexts(msgspec.Struct, frozen=True):
    """For each prompt, a text, or an error if the model refuses the prompt. `started_at`: seconds since the epoch."""

    number: int
    texts: list[str]
    started_at: float
    infer_s: float
    worker: str
    errors: list[str]


@app
def generate(model: CausalLM, request: SweepRequest) -> WrittenTexts:
    """Generate texts. If the model refuses a prompt, the other prompts still get texts. `infer_s` excludes the loading
    of the model.
    """
    started_at, begun = time.time(), time.perf_counter()

    def write(prompts: Sequence[tuple[str, int]]) -> list[str]:
        texts, seeds = zip(*prompts, strict=True)
        return model.generate(
            [model.chat(text) for text in texts] if request.chat else list(texts),
            max_new_tokens=request.max_new_tokens, batch_size=request.tensor_batch, temperature=request.temperature,
            seed=seeds,
        )  # fmt: skip

    texts, errors = run_collecting_errors(write, list(zip(request.texts, request.seeds, strict=True)))
    return WrittenTexts(
        number=request.number, texts=[text or "" for text in texts], started_at=started_at,
        infer_s=time.perf_counter() - begun, worker=f"{socket.gethostname()}:{os.getpid()}",
        errors=[error.replace("prompt 0 ", "the prompt ", 1) for error in errors],
    )  # fmt: skip
