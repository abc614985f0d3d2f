"""Where each table and setting of a TOML text stands: TOML readers keep no line numbers."""

from __future__ import annotations

import re

Path = tuple[str, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=")
_INNER = re.compile(r"[{,]\s*([A-Za-z0-9_-]+)\s*=")
_TOKEN = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*|[\[\]{}]')


def line_of(path: Path, text: str) -> int:
    """The line, from 1, on which a setting stands; where it does not, that of the table which should have it."""
    lines = _lines(text)
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)


def _lines(text: str) -> dict[Path, int]:
    """Where each table and setting stands: its path to its line number. The tables of `[[a]]` are `a.0`, `a.1`, …

    The text is known to be TOML, so a look at line beginnings is enough, as long as lines inside of multi-line
    strings and arrays are skipped. The keys of an inline table stand on its line.
    """
    found: dict[Path, int] = {}
    counted: dict[Path, int] = {}
    table: Path = ()
    until, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not until and depth == 0:
            header, key = _HEADER.match(line), _KEY.match(line)
            if header:
                table = _newest(_dotted(header[2]), counted)
                if header[1] == "[[":
                    counted[table] = counted.get(table, 0) + 1
                    found.setdefault(table, number)
                    table = (*table, str(counted[table] - 1))
                found.setdefault(table, number)
            elif key:
                path = (*table, *_dotted(key[1]))
                for end in range(len(table) + 1, len(path) + 1):
                    found.setdefault(path[:end], number)
                for inner in _INNER.findall(line[key.end() :]):
                    found.setdefault((*path, inner), number)
        until, depth = _left_open(line, until=until, depth=depth)
    return found


def _newest(path: Path, counted: dict[Path, int]) -> Path:
    """A header's path; `[a.b]` below `[[a]]` belongs to the newest table of that list."""
    whole: Path = ()
    for part in path[:-1]:
        whole = (*whole, part)
        if whole in counted:
            whole = (*whole, str(counted[whole] - 1))
    return (*whole, *path[-1:])


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
