"""Find the recipes of earlier sessions with the most similar source code, by cosine similarity (SchedMate §3.1, Similar
Job Retrieval). A recipe's vector has 2 hashed blocks: its facts, and the terms of its normalised source code, weighted
by TF-IDF. A number becomes a bell curve on a logarithmic scale, so 32 is similar to 48, but not to 2,048."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from stoker.contexts.folders import state_folder
from stoker.contexts.performance import MeasurementFile
from stoker.decoding import UNREADABLE
from stoker.manager.advice.source.facts import SourceFact, WorkloadFacts

# ---- vectors


Vector = npt.NDArray[np.float32]

FACTS_WEIGHT = 0.6
"""Weight of the facts in the similarity; the rest is the weight of the source."""
_BITS = 20
_WEIGHTS = {"model": 1.5, "task": 1.2, "framework": 1.2, "data": 0.6}
_BUMP_OCTAVES = 0.75
"""Width of a number's bell curve: twice the number has a similarity of 0.64, and 4 times the number has 0.17."""
_PIECES = re.compile(r"[A-Za-z]+|[0-9]+(?:\.[0-9]+)?")
_TERMS = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9]+(?:\.[0-9]+)?")
_RENAMED = re.compile(r"[avg][0-9]+")
_PARAMETERS = re.compile(r"(?<![A-Za-z0-9.])([0-9]+(?:\.[0-9]+)?)([MB])(?![A-Za-z])", re.IGNORECASE)


def extract_numbers(facts: WorkloadFacts) -> dict[str, float]:
    found = {**facts.known_facts(), **facts.further}
    numbers = {name: float(fact.value) for name, fact in found.items() if isinstance(fact.value, int | float)}
    size = _PARAMETERS.search(str(facts.model.value))
    if size is not None:
        numbers["parameters"] = float(size[1]) * (1e9 if size[2] in "bB" else 1e6)
    return {name: value for name, value in numbers.items() if 0 < value < math.inf}


def make_fact_terms(facts: WorkloadFacts) -> dict[str, float]:
    terms = dict[str, float]()
    for name, number in extract_numbers(facts).items():
        _add_number_terms(terms, name, number)
    for name, fact in {**facts.known_facts(), **facts.further}.items():
        if isinstance(fact.value, str):
            _add_text_fact_terms(terms, name, fact)
    return terms


def make_text_terms(text: str) -> Counter[str]:
    words = [word for word in _TERMS.findall(text) if not _RENAMED.fullmatch(word)]
    return Counter([*words, *(f"{first} {second}" for first, second in pairwise(words))])


def hash_terms_to_vector(terms: Mapping[str, float]) -> tuple[npt.NDArray[np.int64], Vector]:
    """Return a sparse vector (positions, values). The hash of a term gives its position and sign."""
    codes = [zlib.crc32(term.encode(errors="replace")) for term in terms]
    signs = np.array([1.0 if code >> 31 else -1.0 for code in codes], np.float32)
    places = np.array([code & ((1 << _BITS) - 1) for code in codes], np.int64)
    return places, signs * np.fromiter(terms.values(), np.float32, len(terms))


class TermTable:
    def __init__(self, rows: Sequence[Mapping[str, float]], *, idf: bool) -> None:
        self.count = len(rows)
        pairs = [hash_terms_to_vector(row) for row in rows]
        self._places = np.concatenate([places for places, _ in pairs])
        values = np.concatenate([values for _, values in pairs])
        self._read_row = np.repeat(np.arange(len(rows)), [len(places) for places, _ in pairs])
        self._weight = np.ones(1 << _BITS, np.float32)
        if idf:
            used = np.bincount(self._places, minlength=1 << _BITS)
            self._weight = (np.log((1 + len(rows)) / (1 + used)) + 1).astype(np.float32)
            values = np.sign(values) * (1 + np.log(np.maximum(np.abs(values), 1)))
        self._idf = idf
        self._values = values * self._weight[self._places]
        self._lengths = np.sqrt(np.bincount(self._read_row, self._values**2, minlength=len(rows)))

    def cosine_similarities(self, terms: Mapping[str, float]) -> Vector:
        places, values = hash_terms_to_vector(terms)
        if self._idf:
            values = np.sign(values) * (1 + np.log(np.maximum(np.abs(values), 1)))
        dense = np.zeros(1 << _BITS, np.float32)
        np.add.at(dense, places, values * self._weight[places])
        length = float(np.linalg.norm(dense))
        dots = np.bincount(self._read_row, dense[self._places] * self._values, minlength=self.count)
        return np.asarray(dots / np.maximum(self._lengths * length, 1e-12), np.float32)


def _add_number_terms(terms: dict[str, float], name: str, number: float) -> None:
    at = 2 * math.log2(number)
    width = 2 * _BUMP_OCTAVES
    bump = {place: math.exp(-((place - at) ** 2) / (2 * width**2)) for place in range(round(at) - 5, round(at) + 6)}
    length = math.sqrt(sum(value**2 for value in bump.values()))
    terms.update({f"{name}~{place}": _WEIGHTS.get(name, 1.0) * value / length for place, value in bump.items()})


def _add_text_fact_terms(terms: dict[str, float], name: str, fact: SourceFact) -> None:
    """Add a text and its parts as terms, so that model names that differ only in the size are similar."""
    value = str(fact.value).lower()
    weight = _WEIGHTS.get(name, 1.0)
    pieces = set(_PIECES.findall(value))
    terms[f"{name}={value}"] = weight * (math.sqrt(0.5) if pieces else 1.0)
    for piece in pieces:
        terms[f"{name}:{piece}"] = weight * math.sqrt(0.5 / len(pieces))


# ---- history


MOST_ROWS = 3_000
"""Maximum number of rows in the SQLite file; the oldest rows are deleted."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (
    recipe TEXT NOT NULL, function TEXT NOT NULL, name TEXT NOT NULL, facts BLOB NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (recipe, function)
);
"""
_SHAPE = "SELECT recipe, function, name, facts, at FROM sources LIMIT 1"
_PUT = """
INSERT INTO sources (recipe, function, name, facts, at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (recipe, function) DO UPDATE SET name = excluded.name, at = excluded.at, facts = excluded.facts
"""
_DROP = "DELETE FROM sources WHERE at < (SELECT at FROM sources ORDER BY at DESC LIMIT 1 OFFSET ?)"


class SourceRow(msgspec.Struct, frozen=True):
    """The facts of a recipe's loader (if `function` is empty), or of a function together with the loader."""

    recipe: str
    function: str
    name: str
    facts: WorkloadFacts
    at: float


class SourceHistory:
    """Stores the facts of recipes and functions in one SQLite file. Disk errors raise no exception."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._file = MeasurementFile(path or state_folder() / "sources.sqlite", schema=_SCHEMA, shape=_SHAPE)
        self._rows: dict[tuple[str, str], SourceRow] = {}

    def store_facts(self, recipe: str, facts: WorkloadFacts, *, function: str = "", name: str = "") -> None:
        """Store the facts of a recipe's loader, or of a `function` (its key in the measurements) together with the
        loader."""
        row = (recipe, function, name, msgspec.json.encode(facts), time.time())
        self._file.write((_PUT, [row]), (_DROP, [(MOST_ROWS,)]))

    def read_rows(self) -> list[SourceRow]:
        """Return all rows, newest first."""
        stamps = self._file.read("SELECT recipe, function, at FROM sources ORDER BY at DESC, recipe, function")
        fresh = dict[tuple[str, str], SourceRow]()
        for recipe, function, at in stamps:
            known = self._rows.get((recipe, function))
            row = known if known is not None and known.at == at else self._read_row(recipe, function)
            if row is not None:
                fresh[recipe, function] = row
        self._rows = fresh
        return list(fresh.values())

    def close(self) -> None:
        self._file.close()

    def _read_row(self, recipe: str, function: str) -> SourceRow | None:
        query = "SELECT name, facts, at FROM sources WHERE recipe = ? AND function = ?"
        for name, data, at in self._file.read(query, (recipe, function)):
            with contextlib.suppress(*UNREADABLE):  # ignore a damaged row
                return SourceRow(recipe, function, name, msgspec.json.decode(data, type=WorkloadFacts), at)
        return None


# ---- retrieval


class SimilarSource(msgspec.Struct, frozen=True):
    row: SourceRow
    similarity: float


class SimilarSourceFinder:
    def __init__(self, history: SourceHistory) -> None:
        self._history = history
        self._tables: dict[bool, tuple[list[SourceRow], TermTable, TermTable]] = {}

    def find_most_similar(self, facts: WorkloadFacts, *, of_loaders: bool, threshold: float) -> list[SimilarSource]:
        rows = [row for row in self._history.read_rows() if (not row.function) == of_loaders]
        if not rows:
            return []
        if of_loaders not in self._tables or self._tables[of_loaders][0] != rows:
            by_facts = TermTable([make_fact_terms(row.facts) for row in rows], idf=False)
            by_text = TermTable([make_text_terms(row.facts.text) for row in rows], idf=True)
            self._tables[of_loaders] = rows, by_facts, by_text
        _, by_facts, by_text = self._tables[of_loaders]
        of_text = by_text.cosine_similarities(make_text_terms(facts.text))
        alike = FACTS_WEIGHT * by_facts.cosine_similarities(make_fact_terms(facts)) + (1 - FACTS_WEIGHT) * of_text
        for place, row in enumerate(rows):
            if facts.same and row.facts.same == facts.same:
                alike[place] = 1.0
        order = np.argsort(-alike, kind="stable")
        return [
            SimilarSource(rows[place], round(min(1.0, float(alike[place])), 4))
            for place in order
            if alike[place] >= threshold
        ]
