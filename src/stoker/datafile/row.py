"""One row, or one line, of a data file, with its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import ConfigError


class Row(msgspec.Struct, frozen=True):
    """One row: `number` is its line in the file (CSV, JSONL) or its row, both from 1; `place` says so to people."""

    number: int
    place: str
    fields: dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """One line of a text file: `number` from 1, and its bytes without the line's end."""

    number: int
    data: bytes


def check_columns(names: Sequence[str], *, path: Path, where: str) -> None:
    """Raise ConfigError for two columns of one name: a row would keep the last one only. Columns may have no name."""
    twice = next((name for name in names if name and names.count(name) > 1), "")
    if twice:
        problem = f"two columns are called {twice}; give each a name of its own"
        raise ConfigError(f"{path}: {where}: {problem}", file=str(path), key=twice)
