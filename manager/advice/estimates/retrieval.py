"""The recipes in history whose source is most similar, by cosine (SchedMate §3.1, Similar Job Retrieval)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from stoker.manager.advice.estimates.history import SourceHistory, SourceRow
from stoker.manager.advice.estimates.vectors import (
    SHARE_OF_FACTS,
    Encoder,
    TermTable,
    Vector,
    cosines,
    terms_of_facts,
    terms_of_text,
)
from stoker.manager.advice.source.facts import WorkloadFacts

log = logging.getLogger(__name__)


class SimilarSource(msgspec.Struct, frozen=True):
    """A row of history, and how similar it is to what was asked for: 1 is the same source with the same arguments."""

    row: SourceRow
    similarity: float


class SimilarSources:
    """Finds similar rows. `encoder` makes vectors of texts; `encoder_name` keeps those of different ones apart."""

    def __init__(
        self, history: SourceHistory, *, encoder: Encoder | None = None, encoder_name: str = "encoder"
    ) -> None:
        self._history = history
        self._encoder = encoder
        self._encoder_name = encoder_name
        self._tables: dict[bool, _Tables] = {}

    def most_similar(self, facts: WorkloadFacts, *, of_loaders: bool, threshold: float) -> list[SimilarSource]:
        """The rows of similarity `threshold` and more, the most similar first; of loaders, or of functions on them."""
        rows = [row for row in self._history.rows() if (not row.function) == of_loaders]
        if not rows:
            return []
        tables = self._tables.get(of_loaders)
        if tables is None or tables.rows != rows:
            tables = self._tables[of_loaders] = _Tables(rows)
        of_text = self._dense_cosines(facts, rows)
        if of_text is None:
            of_text = tables.texts.cosines(terms_of_text(facts.text))
        alike = SHARE_OF_FACTS * tables.facts.cosines(terms_of_facts(facts)) + (1 - SHARE_OF_FACTS) * of_text
        for place, row in enumerate(rows):
            if facts.same and row.facts.same == facts.same:
                alike[place] = 1.0
        order = np.argsort(-alike, kind="stable")
        return [
            SimilarSource(rows[place], round(min(1.0, float(alike[place])), 4))
            for place in order
            if alike[place] >= threshold
        ]

    def _dense_cosines(self, facts: WorkloadFacts, rows: Sequence[SourceRow]) -> Vector | None:
        """The cosines of the encoder's vectors; None without an encoder, or where it fails."""
        if self._encoder is None:
            return None
        kept = self._history.vectors(self._encoder_name)
        fresh = [row for row in rows if (row.recipe, row.function) not in kept]
        try:
            made = np.asarray(self._encoder([_shown(facts), *(_shown(row.facts) for row in fresh)]), np.float32)
            if made.ndim != 2 or len(made) != len(fresh) + 1 or not np.isfinite(made).all():
                raise ValueError(f"it gave an array of shape {made.shape} for {len(fresh) + 1} texts")
            for row, vector in zip(fresh, made[1:], strict=True):
                kept[row.recipe, row.function] = vector
            found = cosines(np.stack([kept[row.recipe, row.function] for row in rows]), made[0])
        except Exception as error:  # it is the site's code: retrieval goes on without it
            log.warning(
                "the sentence encoder %s failed (%s); the source's terms are compared", self._encoder_name, error
            )
            return None
        self._history.keep_vectors(
            self._encoder_name,
            [(row.recipe, row.function, vector) for row, vector in zip(fresh, made[1:], strict=True)],
        )
        return found


class _Tables:
    def __init__(self, rows: list[SourceRow]) -> None:
        self.rows = rows
        self.facts = TermTable([terms_of_facts(row.facts) for row in rows], idf=False)
        self.texts = TermTable([terms_of_text(row.facts.text) for row in rows], idf=True)


def _shown(facts: WorkloadFacts) -> str:
    """What a sentence encoder reads. It takes some hundred words, so the facts come first."""
    return f"{facts.summary()}\n{facts.text[:2_000]}"
