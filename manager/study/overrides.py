"""`--set key=value`: a scenario's settings, changed before it is read.

A key is a path with dots, as the headers of the file have it (`world.links.shared`); in a list of tables a table goes
by its name, or its place from 0 (`world.sources.pool.capacity`). `world.` may be left out. A value is TOML; what is
none is text: `--set links.shared="1.2 GB/s"` needs no quotes but the shell's own.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from stoker.errors import ConfigError


class Override(NamedTuple):
    """One setting that was changed: as it was given, and its path in the data (places in lists, not names)."""

    text: str
    path: tuple[str, ...]


_NAMED = (("world", "contexts"), ("world", "devices"))
"""Tables of things with names. One that is not there is a slip: what was made of it would be wanted by nobody."""


def apply(data: dict[str, Any], text: str, *, top: Collection[str], world: Collection[str]) -> Override:
    """Change one setting of `data`, in place. `top` and `world`: the settings at the top of a scenario and of its
    world. Whether the setting exists is seen when the scenario is read. Raises ConfigError."""
    key, equals, value = text.partition("=")
    written = [part.strip() for part in key.split(".")]
    if not equals or not all(written):
        raise ConfigError(f"--set {text}: write key=value, as in --set world.links.shared='2 GB/s'", key="set")
    parts = [part.strip("\"'") for part in written]
    if parts[0] not in top and parts[0] in world:
        parts.insert(0, "world")
    here: Any = data
    path: list[str] = []
    for part in parts[:-1]:
        if tuple(path) in _NAMED and isinstance(here, dict) and part not in here:
            raise _unknown(part, here, text)
        here, part = _step(here, part, text)
        path.append(part)
    last = parts[-1]
    if isinstance(here, list):
        last = _place(here, last, text)
        here[int(last)] = _value(value)
    elif isinstance(here, dict):
        here[last] = _value(value)
    else:
        raise ConfigError(f"--set {text}: {'.'.join(path)} is no table", key=last)
    return Override(text, (*path, last))


def _step(here: Any, part: str, text: str) -> tuple[Any, str]:
    """Go one table down; one that is not there yet is made."""
    if isinstance(here, list):
        place = _place(here, part, text)
        return here[int(place)], place
    if not isinstance(here, dict):
        raise ConfigError(f"--set {text}: there is no table above {part}", key=part)
    return here.setdefault(part, {}), part


def _place(tables: list[Any], part: str, text: str) -> str:
    """The place of a table in a list, from its name or its place."""
    names = [str(table.get("name", "")) if isinstance(table, dict) else "" for table in tables]
    if part in names:
        return str(names.index(part))
    if part.isdigit() and int(part) < len(tables):
        return part
    raise _unknown(part, [name or str(number) for number, name in enumerate(names)], text)


def _unknown(part: str, names: Iterable[str], text: str) -> ConfigError:
    known = list(names)
    close = difflib.get_close_matches(part, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"
    return ConfigError(f"--set {text}: there is no {part}; {hint}", key=part)


def _value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return read["value"] if len(read) == 1 else text.strip()
