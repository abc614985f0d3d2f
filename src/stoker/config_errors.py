"""What is wrong with a TOML file, in one line: where it stands, which setting it is, and the nearest valid one.

msgspec finds the fault and says its path (`$.pilot.memory`). Everything here is told the root struct and knows no
setting by name.
"""

from __future__ import annotations

import difflib
import enum
import re
import tomllib
import typing
from collections.abc import Iterable
from typing import Any

import msgspec

from stoker.config_lines import Path, line_of
from stoker.config_types import Read, SettingPlace, is_struct, setting_at, settings, tables, tag_field, tags
from stoker.errors import ConfigError


class ConfigFault(typing.NamedTuple):
    """`line` counts from 1; `key` is the setting; `problem` names the table, the setting and what to do; `path` leads
    to the setting, or to its table."""

    line: int
    key: str
    problem: str
    path: Path = ()


def parse_toml(text: str, *, file: str) -> dict[str, Any]:
    """What a TOML text says; `file` is what an error calls it. Raises ConfigError with the line that is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        problem = _toml_words(re.sub(r" \(at .*\)$", "", str(error)))
        raise ConfigError(f"{file}: line {line}: not TOML: {problem}", file=file, line=line) from None
    except RecursionError:
        raise ConfigError(f"{file}: not TOML: its lists or tables are nested too deep", file=file) from None
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"{file}: not TOML: {error}", file=file) from None


_TOML_WORDS = {
    "Illegal character '\\n'": "a closing quote is missing",
    "Unterminated string": "a closing quote is missing",
    'Expected "\'"': "a closing quote is missing",
    "Unescaped '\\' in a string": "a backslash in quotes is written twice, or the text stands in single quotes",
    "Invalid value": 'a value is missing or wrong; text stands in quotes, as in name = "lab"',
    "Invalid statement": "a setting is written name = value, a table [name] on a line of its own",
    "Expected '=' after a key": "a setting is written name = value, a table [name] on a line of its own",
    "Expected newline or end of document": "something stands behind a value; a comment begins with #",
    "Expected ']' at the end of a table": "the closing ] of a table is missing",
    "Unclosed array": "the closing ] of a list is missing",
    "Unclosed inline table": "the closing } of a table is missing",
    "Cannot overwrite a value": "this setting stands there twice",
    "Cannot declare": "this table stands there twice",
}
"""What tomllib's messages begin with, and what is told instead."""


def _toml_words(problem: str) -> str:
    """What is wrong with a TOML text, in words; what tomllib says, where there are none."""
    return next((words for begins, words in _TOML_WORDS.items() if problem.startswith(begins)), problem)


class _Said(typing.NamedTuple):
    """What is wrong in words, and with which setting of which table."""

    table: int
    """How many parts of the path are the table."""
    key: str
    words: str


def explain(
    fault: str, *, text: str, root: type[msgspec.Struct], shapes: dict[str, str], data: Any = None,
    read: Read | None = None,
) -> ConfigFault:  # fmt: skip
    """The fault in words, from a message of msgspec's and the text that it is about.

    `shapes` says for settings that must match a pattern what to write. `data` is what was read of the text, and `read`
    reads its units: wanted where tables stand in lists or by names.
    """
    problem, _, where = fault.partition(" - at `$")
    parts = tuple(name or number for name, number in _STEP.findall(where.rstrip("`")))
    place = setting_at(root, parts, data=data, read=read)
    said = _words(problem, place, root, shapes, data=data, read=read)
    path = (*place.path[: said.table], said.key.partition("[")[0])
    table = ".".join(place.shown[: said.table])
    return ConfigFault(line_of(path, text), said.key, f"[{table}] {said.words}" if table else said.words, path)


_STEP = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")


def _words(
    problem: str,
    place: SettingPlace,
    root: type[msgspec.Struct],
    shapes: dict[str, str],
    *,
    data: Any,
    read: Read | None,
) -> _Said:
    parts, kind = place.path, place.kind
    whole = len(parts)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", problem)
    if unknown:
        return _Said(whole, unknown[1], f"{unknown[1]} is not a setting; {_nearest(root, kind, unknown[1])}")
    missing = re.fullmatch(r"Object missing required field `(.*)`", problem)
    if missing:
        choices = f"; {_choices(tags(kind), '')}" if missing[1] == tag_field(kind) else ""
        return _Said(whole, missing[1], f"{missing[1]} is missing{choices}")
    if is_struct(kind) and not problem.startswith("Expected `object`"):
        # a check of several settings: its message begins with one
        return _Said(whole, re.split(r"[ :]", problem, maxsplit=1)[0], problem)
    last = max((number for number, part in enumerate(parts) if not part.isdigit()), default=0)
    key = parts[last] + "".join(f"[{part}]" for part in parts[last + 1 :]) if parts else ""
    if is_struct(kind) and last == whole - 1:
        return _Said(last, key, f"{key} is a table: write [{key}] on a line of its own, and its settings below")
    invalid = re.match(r"Invalid (?:enum )?value (.*)$", problem)
    if invalid:
        above = setting_at(root, parts[:-1], data=data, read=read).kind
        known = _values(kind) or tags(above)
        return _Said(last, key, f"{key} = {invalid[1]} is not available; {_choices(known, invalid[1])}")
    if "matching regex" in problem and key in shapes:
        return _Said(last, key, f"{key}: {shapes[key]}")
    wanted = re.match(r"Expected `(.*?)`( [<>]=? \S+)?(?:, got `(.*)`)?$", problem)
    if wanted:
        got = f", not {_TYPES.get(wanted[3], wanted[3])}" if wanted[3] else ""
        bound = wanted[2].replace(">=", "of at least").replace("<=", "of at most") if wanted[2] else ""
        types = " or ".join(_TYPES.get(each, each) for each in wanted[1].split(" | ") if each != "null")
        return _Said(last, key, f"{key} must be {types}{bound}{got}")
    return _Said(last, key, f"{key}: {problem}")


_TYPES = {
    "int": "a whole number", "str": "text in quotes", "float": "a number", "bool": "true or false",
    "array": "a list", "object": "a table",
}  # fmt: skip


def _values(kind: Any) -> list[str]:
    """The values of an enum, also of one that may be left out; none for any other type."""
    kinds = (kind, *typing.get_args(kind))
    return [
        str(value.value) for each in kinds if isinstance(each, type) and issubclass(each, enum.Enum) for value in each
    ]


def _nearest(root: type[msgspec.Struct], table: Any, key: str) -> str:
    """What may have been meant: a setting of this table, one of another table, or all that there are."""
    here = settings(table)
    close = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    for other, there in tables(root):
        close = difflib.get_close_matches(key, there, n=1, cutoff=0.75)
        if close and there != here:
            return f"did you mean {close[0]} {f'in [{other}]' if other else 'at the top of the file'}?"
    return f"there are {', '.join(here or settings(root))}"


def _choices(known: Iterable[str], value: str) -> str:
    names = list(known)
    close = difflib.get_close_matches(value.strip("'"), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(map(repr, names))}"
