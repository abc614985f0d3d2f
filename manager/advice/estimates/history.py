"""The facts of recipes and functions that ran, in one SQLite file of the user's state folder.

What they cost lies in the performance store, by recipe key and function; here is only what their source says. A row is
kept a recipe and function; the function `""` stands for the recipe's loader alone. Several processes may write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from stoker.contexts.folders import state_folder
from stoker.contexts.measurements import Measurements
from stoker.manager.advice.estimates.vectors import Vector
from stoker.manager.advice.source.facts import WorkloadFacts

MOST_ROWS = 3_000
"""The rows that were written first are dropped."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (
    recipe TEXT NOT NULL, function TEXT NOT NULL, name TEXT NOT NULL, facts BLOB NOT NULL, at REAL NOT NULL,
    encoder TEXT NOT NULL DEFAULT '', vector BLOB,
    PRIMARY KEY (recipe, function)
);
"""
_SHAPE = "SELECT recipe, function, name, facts, at, encoder, vector FROM sources LIMIT 1"
_PUT = """
INSERT INTO sources (recipe, function, name, facts, at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (recipe, function) DO UPDATE SET name = excluded.name, at = excluded.at,
    vector = CASE WHEN facts = excluded.facts THEN vector END, facts = excluded.facts
"""
_DROP = "DELETE FROM sources WHERE at < (SELECT at FROM sources ORDER BY at DESC LIMIT 1 OFFSET ?)"


class SourceRow(msgspec.Struct, frozen=True):
    """The facts of a recipe's loader (`function` is empty), or of a function together with its loader."""

    recipe: str
    function: str
    name: str
    facts: WorkloadFacts
    at: float


class SourceHistory:
    """The facts in one file. No method raises for want of a disk; a damaged file is set aside and begun anew."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._file = Measurements(path or state_folder() / "sources.sqlite", schema=_SCHEMA, shape=_SHAPE)
        self._rows: dict[tuple[str, str], SourceRow] = {}

    def remember(self, recipe: str, facts: WorkloadFacts, *, function: str = "", name: str = "") -> None:
        """Keep the facts of a recipe, or of a function (its key or name, as measured) on it. `name` is for people."""
        row = (recipe, function, name, msgspec.json.encode(facts), time.time())
        self._file.write((_PUT, [row]), (_DROP, [(MOST_ROWS,)]))

    def rows(self) -> list[SourceRow]:
        """All that is kept, the last written first. What did not change since the last call is not read again."""
        stamps = self._file.read("SELECT recipe, function, at FROM sources ORDER BY at DESC, recipe, function")
        fresh = dict[tuple[str, str], SourceRow]()
        for recipe, function, at in stamps:
            known = self._rows.get((recipe, function))
            row = known if known is not None and known.at == at else self._row(recipe, function)
            if row is not None:
                fresh[recipe, function] = row
        self._rows = fresh
        return list(fresh.values())

    def vectors(self, encoder: str) -> dict[tuple[str, str], Vector]:
        """The vectors that this encoder made, by recipe and function."""
        rows = self._file.read(
            "SELECT recipe, function, vector FROM sources WHERE encoder = ? AND vector IS NOT NULL", (encoder,)
        )
        return {(recipe, function): np.frombuffer(data, np.float32) for recipe, function, data in rows}

    def keep_vectors(self, encoder: str, vectors: Sequence[tuple[str, str, Vector]]) -> None:
        """Keep what an encoder made of rows' facts."""
        rows = [
            (encoder, vector.astype(np.float32).tobytes(), recipe, function) for recipe, function, vector in vectors
        ]
        self._file.write(("UPDATE sources SET encoder = ?, vector = ? WHERE recipe = ? AND function = ?", rows))

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        self._file.close()

    def _row(self, recipe: str, function: str) -> SourceRow | None:
        found = self._file.read(
            "SELECT name, facts, at FROM sources WHERE recipe = ? AND function = ?", (recipe, function)
        )
        for name, data, at in found:
            try:
                facts = msgspec.json.decode(data, type=WorkloadFacts)
            except (msgspec.DecodeError, UnicodeDecodeError):  # of a later version, or damaged
                return None
            return SourceRow(recipe, function, name, facts, at)
        return None
