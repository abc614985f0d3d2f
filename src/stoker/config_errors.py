"""What is wrong with a site file, in one line: where it stands, which setting it is, and the nearest valid one.

msgspec finds the fault and says its path (`$.pilot.memory`); a small scan of the text says on which line that path
stands, because TOML readers keep no line numbers. Everything here is told the root struct and knows no setting by name.
"""

from __future__ import annotations

import difflib
import enum
import re
import typing
from typing import Any

import msgspec

Path = tuple[str, ...]


class Fault(typing.NamedTuple):
    """`line` counts from 1; `key` is the setting; `problem` names the table, the setting and what to do."""

    line: int
    key: str
    problem: str


def explain(fault: str, *, text: str, root: type[msgspec.Struct], shapes: dict[str, str]) -> Fault:
    """The fault in words, from a message of msgspec's and the text that it is about.

    `shapes` says for settings that must match a pattern what to write.
    """
    problem, _, path = fault.partition(" - at `$")
    parts = tuple(part for part in re.split(r"[.\[]", path.rstrip("`")) if part)
    table, key, words = _words(problem, parts, root, shapes)
    lines = _lines(text)
    line = lines.get((*table, key)) or lines.get(table) or 1
    return Fault(line, key, f"[{'.'.join(table)}] {words}" if table else words)


def _words(problem: str, parts: Path, root: type[msgspec.Struct], shapes: dict[str, str]) -> tuple[Path, str, str]:
    unknown = re.search(r"unknown field `(.*)`", problem)
    if unknown:
        return parts, unknown[1], f"{unknown[1]} is not a setting; {_nearest(root, parts, unknown[1])}"
    type_at = _type_at(root, parts)
    if isinstance(type_at, type) and issubclass(type_at, msgspec.Struct):
        if problem.startswith("Expected `object`"):
            return (
                parts[:-1],
                parts[-1],
                f"{parts[-1]} is a table: write [{parts[-1]}] on a line of its own, and its settings below",
            )
        return parts, problem.partition(" ")[0], problem  # a check of several settings: its message begins with one
    table, key = parts[:-1], parts[-1] if parts else ""
    invalid = re.search(r"Invalid enum value (.*)$", problem)
    if invalid and isinstance(type_at, type) and issubclass(type_at, enum.Enum):
        return table, key, f"{key} = {invalid[1]} is not available; {_choices(type_at, invalid[1])}"
    if "matching regex" in problem and key in shapes:
        return table, key, f"{key}: {shapes[key]}"
    wanted = re.match(r"Expected `(.*?)`( [<>]=? \S+)?(?:, got `(.*)`)?$", problem)
    if wanted:
        got = f", not {_TYPES.get(wanted[3], wanted[3])}" if wanted[3] else ""
        bound = wanted[2].replace(">=", "of at least").replace("<=", "of at most") if wanted[2] else ""
        return table, key, f"{key} must be {_TYPES.get(wanted[1], wanted[1])}{bound}{got}"
    return table, key, f"{key}: {problem}"


_TYPES = {
    "int": "a whole number", "str": "text in quotes", "float": "a number", "bool": "true or false",
    "array": "a list", "object": "a table",
}  # fmt: skip


def _type_at(root: type[msgspec.Struct], parts: Path) -> Any:
    here: Any = root
    for part in parts:
        hints = typing.get_type_hints(here)
        names = {field.encode_name: field.name for field in msgspec.structs.fields(here)}
        here = hints.get(names.get(part, ""))
        if not (isinstance(here, type) and issubclass(here, msgspec.Struct)):
            break
    return here


def _tables(root: type[msgspec.Struct]) -> dict[Path, list[str]]:
    """The settings of every table, the root's first."""
    tables: dict[Path, list[str]] = {(): []}
    for field in msgspec.structs.fields(root):
        tables[()].append(field.encode_name)
        inner = _type_at(root, (field.encode_name,))
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            tables[(field.encode_name,)] = [each.encode_name for each in msgspec.structs.fields(inner)]
    return tables


def _nearest(root: type[msgspec.Struct], table: Path, key: str) -> str:
    """What may have been meant: a setting of this table, one of another table, or all that there are."""
    tables = _tables(root)
    close = difflib.get_close_matches(key, tables.get(table, []), n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    for other, settings in tables.items():
        close = difflib.get_close_matches(key, settings, n=1, cutoff=0.75)
        if close and other != table:
            return f"did you mean {close[0]} {f'in [{other[0]}]' if other else 'at the top of the file'}?"
    return f"there are {', '.join(tables.get(table, tables[()]))}"


def _choices(kind: type[enum.Enum], value: str) -> str:
    names = [str(member.value) for member in kind]
    close = difflib.get_close_matches(value.strip("'"), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(map(repr, names))}"


# ---- where it stands

_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")
_INNER = re.compile(r"[{,]\s*([A-Za-z0-9_-]+)\s*=")
_TOKEN = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*|[\[\]{}]')


def _lines(text: str) -> dict[Path, int]:
    """Where each table and setting stands: its path to its line number, from 1.

    The text is known to be TOML, so a look at line beginnings is enough, as long as lines inside of multi-line
    strings and arrays are skipped. The keys of an inline table stand on its line.
    """
    found: dict[Path, int] = {}
    table: Path = ()
    until, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not until and depth == 0:
            header, key = _HEADER.match(line), _KEY.match(line)
            if header:
                table = _dotted(header[1])
                found.setdefault(table, number)
            elif key:
                path = (*table, *_dotted(key[1]))
                for end in range(len(table) + 1, len(path) + 1):
                    found.setdefault(path[:end], number)
                for inner in _INNER.findall(line[key.end() :]):
                    found.setdefault((*path, inner), number)
        until, depth = _left_open(line, until=until, depth=depth)
    return found


def _dotted(text: str) -> Path:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _left_open(line: str, *, until: str, depth: int) -> tuple[str, int]:
    """The quotes of a multi-line string, and the number of brackets, that are open at the end of this line."""
    position = 0
    while True:
        if until:
            end = line.find(until, position)
            if end < 0:
                return until, depth
            position, until = end + 3, ""
        token = _TOKEN.search(line, position)
        if not token:
            return "", depth
        position = token.end()
        if token[0] in ('"""', "'''"):
            until = token[0]
        elif token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
