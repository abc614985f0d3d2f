"""The function of this application that runs on a pilot, with a ready-made context: `causal_lm(path)`.

    recipe = causal_lm("models/small", slots=1)               a value: nothing is loaded yet
    scored = verify.with_options(context=recipe)              the same function, on that model
    with stoker.load("site.toml"):                            pilots start, here or on a cluster
        for scores in stoker.map(scored, questions):          each pilot loads the model once
            ...

`@app` decorates a function whose first argument is the loaded model; callers leave that argument out. `run.py` does
this example, with a log of results and a progress line. Your own context is a loader under `@context`: it
runs once in a process on a pilot, and its result stays there (`prompt_tuning/functions.py` has one). Equal loaders
make one context, so other applications of a session share this model.

A question is some filled templates and the three possible answer words; its scores are the log-probability of each
word. `--awareness` changes the recipe and not the function.
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
    """The work of one call: `prefix` with each of `texts`, answered by one of `words`, `tensor_batch` at a time."""

    number: int
    prefix: str
    texts: tuple[str, ...]
    words: tuple[str, ...]
    tensor_batch: int = 1


class Scores(msgspec.Struct, frozen=True):
    """The result of a call: a row of log-probabilities per text, when it started (epoch), and its duration."""

    number: int
    rows: list[list[float]]
    started_at: float
    infer_s: float
    worker: str
    origin: str = ""


@app
def verify(model: CausalLM, question: Question) -> Scores:
    """Score every word after every text. Only inference is timed; the model is loaded before."""
    started_at, begun = time.time(), time.perf_counter()
    try:
        rows = model.label_scores(
            list(question.texts), list(question.words), batch_size=question.tensor_batch, prefix=question.prefix
        )
    except ValueError as error:
        # Inputs that the model refuses, such as a claim that is too long. The caller knows which claims these were.
        raise StokerError(str(error), question=question.number) from error
    infer_s = time.perf_counter() - begun
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Scores(
        number=question.number, rows=rows, started_at=started_at, infer_s=infer_s, worker=worker, origin=model.origin
    )
