"""What runs beside a model: some filled prompts in, what the model wrote out."""

from __future__ import annotations

import os
import socket
import time
from typing import Protocol

import msgspec


class Writer(Protocol):
    """What a causal LM context offers to this application."""

    def chat(self, message: str) -> str:
        """The prompt that puts this message in the model's own chat format."""

    def generate(
        self, prompts: list[str], *, max_new_tokens: int, batch_size: int, temperature: float, seed: int
    ) -> list[str]:
        """What the model writes after each prompt; draws depend on the seed and the prompt's place in the call."""


class Request(msgspec.Struct, frozen=True):
    """One call's work: texts that share their generation parameters, `tensor_batch` of them in one tensor.

    `seeds` has one a text: what is drawn for a row must not depend on which call it is in.
    """

    number: int
    texts: tuple[str, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    chat: bool = False
    tensor_batch: int = 1


class Written(msgspec.Struct, frozen=True):
    """What a call brings back: a text a prompt, when it began (epoch), how long it took."""

    number: int
    texts: list[str]
    started_at: float
    infer_s: float
    worker: str


def generate(model: Writer, request: Request) -> Written:
    """Has the model write. Only the inference is timed."""
    started_at, begun = time.time(), time.perf_counter()
    alone = request.temperature > 0
    asked = [model.chat(text) for text in request.texts] if request.chat else list(request.texts)
    groups = [([text], seed) for text, seed in zip(asked, request.seeds, strict=True)]
    texts: list[str] = []
    for prompts, seed in groups if alone else [(asked, 0)]:
        texts += model.generate(
            prompts,
            max_new_tokens=request.max_new_tokens,
            batch_size=request.tensor_batch,
            temperature=request.temperature,
            seed=seed,
        )
    infer_s = time.perf_counter() - begun
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Written(number=request.number, texts=texts, started_at=started_at, infer_s=infer_s, worker=worker)
