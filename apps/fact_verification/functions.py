"""The function of this application that runs on a pilot, with the built-in context `causal_lm(path)`.

    recipe = causal_lm("models/small", slots=1)               a value: nothing is loaded yet
    scored = verify.with_options(context=recipe)              the same function, on that model
    with stoker.load("site.toml"):                            pilots start, here or on a cluster
        for scores in stoker.map(scored, questions):          each pilot loads the model once
            ...

The first argument of a function under `@app` is the loaded model; callers omit this argument. A custom context is a
loader under `@context` (see `prompt_tuning/functions.py`). Applications of a session share the loaded model.

A question contains several filled templates and the three possible answer words. The scores of a question are the
log-probabilities of the words.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from stoker import app
from stoker.errors import StokerError

if TYPE_CHECKING:
    from stoker.contexts import CausalLM


class Question(msgspec.Struct, frozen=True):
    """Prompts that start with `prefix` and end with one of `texts`, and possible answers (`words`)."""

    number: int
    prefix: str
    texts: tuple[str, ...]
    words: tuple[str, ...]
    tensor_batch: int = 1


class Scores(msgspec.Struct, frozen=True):
    """The log-probabilities of the answer words: a row per text. `started_at`: seconds since the epoch."""

    number: int
    rows: list[list[float]]
    started_at: float
    infer_s: float
    worker: str
    origin: str = ""


@app
def verify(model: CausalLM, question: Question) -> Scores:
    """Return the log-probability of each answer word after each text. `infer_s` excludes the loading of the model."""
    started_at, begun = time.time(), time.perf_counter()
    try:
        rows = model.label_scores(
            list(question.texts), list(question.words), batch_size=question.tensor_batch, prefix=question.prefix
        )
    except ValueError as error:
        # The model refuses an input, for example a claim that is too long. The caller names the claims of the question.
        raise StokerError(str(error), question=question.number) from error
    infer_s = time.perf_counter() - begun
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Scores(
        number=question.number, rows=rows, started_at=started_at, infer_s=infer_s, worker=worker, origin=model.origin
    )
