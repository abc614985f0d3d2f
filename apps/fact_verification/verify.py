"""What runs beside the model: one decorated function over one ready-made context.

Each call carries some filled templates and the three words that may answer them, and brings back the log-likelihood of
each word. That the model is loaded once and reused is not to be seen here: it is the context's business, and
`--awareness` changes the recipe, not this function.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Protocol

import msgspec

from stoker.errors import StokerError


class Scorer(Protocol):
    """What a causal LM context offers to this application."""

    @property
    def origin(self) -> str:
        """How it was loaded, for people."""

    def label_scores(
        self, prompts: list[str], labels: list[str], *, batch_size: int = 1, prefix: str = ""
    ) -> list[list[float]]:
        """The log-likelihood of each label after `prefix` and each prompt."""


class Question(msgspec.Struct, frozen=True):
    """One call's work: `prefix` and each of `texts` to be answered with one of `words`, `tensor_batch` in a tensor."""

    number: int
    prefix: str
    texts: tuple[str, ...]
    words: tuple[str, ...]
    tensor_batch: int = 1


class Scores(msgspec.Struct, frozen=True):
    """What a call brings back: a row of log-likelihoods a text, when it began (epoch), how long it took."""

    number: int
    rows: list[list[float]]
    started_at: float
    infer_s: float
    worker: str
    origin: str = ""


def verify(model: Scorer, question: Question) -> Scores:
    """Scores every word after every text. Only the inference is timed: a load is over before this is called."""
    started_at, begun = time.time(), time.perf_counter()
    try:
        rows = model.label_scores(
            list(question.texts), list(question.words), batch_size=question.tensor_batch, prefix=question.prefix
        )
    except ValueError as error:
        # What the model cannot take, such as a claim that is too long. The caller knows which claims these were.
        raise StokerError(str(error), question=question.number) from error
    infer_s = time.perf_counter() - begun
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return Scores(
        number=question.number,
        rows=rows,
        started_at=started_at,
        infer_s=infer_s,
        worker=worker,
        origin=model.origin,
    )
