"""How likely texts are after prompts, through a model of Transformers.

One pass over the prompt gives the log-likelihood of every label of one token; labels of more tokens add just their own
to that pass, all labels together (`forward.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from stoker.contexts.forward import Ids, ModelRunner, shared_beginning


def go_on() -> None:
    """The check of a scoring that nothing stops."""


class TailScorer(Protocol):
    """What scores tokens after prompts. It is asked between two steps of the engine, in the engine's thread."""

    def score(
        self,
        rows: list[Ids],
        tails: list[list[Ids]],
        *,
        prefix: Ids = (),
        batch_size: int = 1,
        check: Callable[[], None] = go_on,
    ) -> list[list[float]]:
        """The log-likelihood of each tail (one token or more) after its row: `[rows][tails of the row]`. `prefix`:
        what the caller has put before every row. `batch_size` rows are computed at a time, where that is a choice.
        `check` is called before each pass through the model; what it raises ends the scoring and leaves nothing."""


class RunnerScorer:
    """Scores through the model itself."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def score(
        self,
        rows: list[Ids],
        tails: list[list[Ids]],
        *,
        prefix: Ids = (),
        batch_size: int = 1,
        check: Callable[[], None] = go_on,
    ) -> list[list[float]]:
        """The log-likelihood of each tail after its row (`TailScorer.score`)."""
        scores: list[list[float]] = [[]] * len(rows)
        with torch.inference_mode():
            for group in self._groups(rows, prefix=prefix, batch_size=batch_size):
                check()
                some = [rows[index] for index in group]
                after = [tails[index] for index in group]
                found = self._with_tails(some, after) if self._runner.shares else self._whole(some, after)
                for index, row in zip(group, found, strict=True):
                    scores[index] = row
        return scores

    def _groups(self, rows: list[Ids], *, prefix: Ids, batch_size: int) -> list[list[int]]:
        """Prompts to compute together, by index: of like length, to pad little. What all have is computed first."""
        if prefix:
            self._runner.share(shared_beginning([*rows, prefix]))
        if len(rows) > 1:
            self._runner.share(shared_beginning(rows))
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index])) if batch_size > 1 else range(len(rows))
        return [list(order[start : start + batch_size]) for start in range(0, len(rows), batch_size)]

    def _with_tails(self, rows: list[Ids], tails: list[list[Ids]]) -> list[list[float]]:
        # The last token of a tail is never read: what matters of it is how likely it was.
        logits, after = self._runner.prefill_with_tails(rows, [[tail[:-1] for tail in some] for some in tails])
        first = torch.log_softmax(logits, dim=-1)
        scores: list[list[float]] = []
        for row, some in enumerate(tails):
            scores.append([float(first[row, tail[0]]) for tail in some])
            for label, tail in enumerate(some):
                if len(tail) > 1:
                    steps = torch.log_softmax(after[row][label], dim=-1)
                    scores[row][label] += sum(float(steps[at, token]) for at, token in enumerate(tail[1:]))
        return scores

    def _whole(self, rows: list[Ids], tails: list[list[Ids]]) -> list[list[float]]:
        """For models without a cache that can be shared: every tail with its whole prompt."""
        scores: list[list[float]] = []
        for row, some in zip(rows, tails, strict=True):
            logits = self._runner.whole([row + tail[:-1] for tail in some])
            steps = torch.log_softmax(logits[:, len(row) - 1 :], dim=-1)
            scores.append([
                sum(float(steps[label, at, token]) for at, token in enumerate(tail)) for label, tail in enumerate(some)
            ])  # fmt: skip
        return scores
