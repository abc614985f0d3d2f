"""Source lines of functions whose files do not exist elsewhere: cells of a notebook, lines typed at a prompt.

A traceback shows a line of code by reading its file. The file of a notebook's cell exists in the notebook's process
alone, and a script's may not be seen by a pilot. So the lines of functions that travel by value travel with them: put a
`SourceLines` behind a function in what is pickled (`payloads`), and where that is unpickled Python's `linecache` knows
the lines. A file that exists there is not replaced.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any

LIMIT_CHARACTERS = 65_536
"""More source than this does not travel with one function."""


class SourceLines:
    """Stands behind functions in a value to pickle; `payloads` puts their source lines in its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return know, ({},)


def lines_of(codes: Iterable[types.CodeType]) -> dict[str, dict[int, list[str]]]:
    """The source lines of these functions, by file name and number of the first line (from 1), as far as known."""
    found: dict[str, dict[int, list[str]]] = {}
    room = LIMIT_CHARACTERS
    for code in codes:
        block = _block(code.co_filename, code)
        size = sum(map(len, block))
        if block and size <= room:
            room -= size
            found.setdefault(code.co_filename, {})[code.co_firstlineno] = block
    return found


@functools.lru_cache(maxsize=1024)
def _block(file: str, code: types.CodeType) -> list[str]:
    lines = linecache.getlines(file)
    first = code.co_firstlineno
    return inspect.getblock(lines[first - 1 :]) if 1 <= first <= len(lines) else []


def know(files: Mapping[str, Mapping[int, list[str]]]) -> None:
    """Let this process's tracebacks show these lines."""
    for name, blocks in files.items():
        if os.path.exists(name):
            continue
        known = linecache.cache.get(name)
        lines = list(known[2]) if known is not None and len(known) == 4 else []
        for first, block in blocks.items():
            last = first - 1 + len(block)
            lines += ["\n"] * (last - len(lines))
            lines[first - 1 : last] = block
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # without a time it is never checked again
