"""TOML files of a program's own, whose errors name the file, the line, the setting and the nearest one that exists.

    data = parse_toml(path.read_text(), file=str(path))
    refuse_unknown(data, ["model", "prompts"], file=path, where="top")

Both raise ConfigError, with the facts `file`, `line` and `key` where they are known.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.config_errors import parse_toml
from stoker.errors import ConfigError

__all__ = ["nearest", "parse_toml", "refuse_unknown"]


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean plain?`, or the list of known names when none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known: {', '.join(names)}" if names else ""


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], *, file: Path, where: str) -> None:
    """Raises ConfigError for the first key of `table` that is not known, naming file, place and the nearest key."""
    names = list(known)
    for key in table:
        if key not in names:
            raise ConfigError(f"{file}: {where}: {key} is not a setting{nearest(key, names)}", file=str(file), key=key)
