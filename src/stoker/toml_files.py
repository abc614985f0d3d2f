"""Read TOML files of applications. Errors name the file, the line, the setting and the nearest valid setting.

    data = parse_toml(path.read_text(), file=str(path))
    refuse_unknown(data, ["model", "prompts"], file=path, where="top")
    settings = read_struct(path.read_text(), MySettings, file=str(path))

All functions raise ConfigError, with `file`, `line` and `key` if known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.config import read_unit
from stoker.config_errors import find_setting_line, parse_toml, read_toml, suggest_similar_name
from stoker.errors import ConfigError

__all__ = ["nearest", "parse_toml", "read_struct", "refuse_unknown", "setting_error"]

S = TypeVar("S", bound=msgspec.Struct)


def read_struct(text: str, shape: type[S], *, file: str) -> S:
    """Return TOML text as a msgspec Struct.

    Args:
        text: TOML. Sizes and times (`stoker.config.Size`, `Duration`) have units.
        shape: Class of the Struct.
        file: Name of the file, for errors.

    Raises:
        ConfigError: The text is not TOML, or a setting is wrong.
    """
    return read_toml(text, shape, file=file, shapes={}, read=read_unit, data=parse_toml(text, file=file))


def setting_error(problem: str, *path: str, text: str, file: str) -> ConfigError:
    """Return an error about a setting, with the line of the setting.

    Args:
        problem: The fault.
        *path: The tables and the setting.
        text: The file's content.
        file: The file's name.
    """
    table = f"[{'.'.join(path[:-1])}] " if path[:-1] else ""
    return ConfigError.in_file(file, f"{table}{problem}", line=find_setting_line(path, text), key=path[-1])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint: the most similar name (`; did you mean plain?`), or else all known names.

    Args:
        name: The unknown name.
        known: The known names.
    """
    names = list(known)
    hint = suggest_similar_name(name, names, otherwise=f"known: {', '.join(names)}" if names else "")
    return f"; {hint}" if hint else ""


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], *, file: Path, where: str) -> None:
    """Raise ConfigError for the first unknown key of a table.

    Args:
        table: Values by key.
        known: The valid keys.
        file: The file.
        where: Name of the table, for errors.
    """
    names = list(known)
    for key in table:
        if key not in names:
            raise ConfigError.in_file(file, f"{where}: {key} is not a setting{nearest(key, names)}", key=key)
