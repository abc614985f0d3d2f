"""The lengths of a user's own texts: a sample of a data file, in tokens."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from stoker.apps.common.data_rows import is_empty
from stoker.contexts import token_counter
from stoker.datafile import Row, read_rows
from stoker.errors import ConfigError

SAMPLE = 4000
"""Texts whose tokens are counted."""
_READ_ROWS = 200_000
"""Rows that are read at the most: the sample is drawn from these."""


def sample_texts(path: Path, column: str, *, seed: int = 1) -> list[str]:
    """Some thousands of texts of a file, each row of its beginning as likely as any other; rows without a text are left
    out. Raises ConfigError for a file without texts, and a row without the column."""
    chance, found, count = random.Random(seed), list[str](), 0
    for row in itertools.islice(read_rows(path), _READ_ROWS):
        text = _text(row, column, path=path)
        if not text:
            continue
        count += 1
        if len(found) < SAMPLE:
            found.append(text)
        elif (place := chance.randrange(count)) < SAMPLE:
            found[place] = text
    if not found:
        raise ConfigError(f"{path}: no row has a text in {column}", file=str(path), key=column)
    return found


def _text(row: Row, column: str, *, path: Path) -> str:
    value = row.fields.get(column)
    if column in row.fields and is_empty(value):
        return ""
    if not isinstance(value, str):
        what = f"is {value!r:.40}" if column in row.fields else f"is missing (the row has {', '.join(row.fields)})"
        raise ConfigError(
            f"{path}: {row.place}: {column} must be text, and {what}; name another column with --text",
            file=str(path), line=row.number, key=column,
        )  # fmt: skip
    return value


def count_texts(model: str, texts: list[str]) -> list[int]:
    """The tokens of each text. Raises RecipeError for a model whose tokenizer cannot be read."""
    count = token_counter(model)
    return [count(text) for text in texts]
