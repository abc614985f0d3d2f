"""Facts about a function: the names that its bytecode refers to, its kind, and its source lines.

The source lines of a notebook's cell exist in the notebook's process alone. Put a `SourceLines` behind a function in a
value to pickle (`payloads`): the lines travel, and the `linecache` of the other process shows them in tracebacks.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import linecache
import os
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

# ---- bytecode


Found = TypeVar("Found")

_PLACE = frozenset({"__file__", "__path__", "__spec__"})
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Names of globals that code refers to, nested code included."""
    names = frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname in _GLOBAL_OPS)
    return names | _nested(code, global_names)


@functools.lru_cache(maxsize=1024)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Names that code looks up, as attributes or otherwise, nested code included."""
    return frozenset(code.co_names) | _nested(code, attribute_names)


@functools.lru_cache(maxsize=1024)
def names_in_class_bodies(code: types.CodeType) -> frozenset[str]:
    """Names of globals that the bodies of classes in code refer to, where no variable of the body has that name."""
    steps = list(dis.get_instructions(code))
    stored = {step.argval for step in steps if step.opname == "STORE_NAME"}
    names = frozenset(str(step.argval) for step in steps if step.opname == "LOAD_NAME" and step.argval not in stored)
    return names | _nested(code, names_in_class_bodies)


class Import(NamedTuple):
    """One import statement: `from ..module import names` has level 2; `import module` has level 0 and no names."""

    level: int
    module: str
    names: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def imports(code: types.CodeType) -> frozenset[Import]:
    """Return the imports that code makes when it runs, nested code included."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    found = frozenset(
        Import(int(level.argval or 0), str(step.argval or ""), tuple(names.argval or ()))
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False)
        if step.opname == "IMPORT_NAME"
    )
    return found | _nested(code, imports)


def imported_names(code: types.CodeType) -> frozenset[str]:
    """Dotted names of modules that code imports by their full names when it runs, nested code included."""
    return frozenset(one.module for one in imports(code) if not one.level)


def asks_where_it_lies(code: types.CodeType) -> bool:
    """True if code may read files next to it: then the same code in another folder differs."""
    if not _PLACE.isdisjoint(global_names(code)):
        return True
    return any(
        f"{one.module}.{name}".startswith(("importlib.resources", "pkgutil"))
        for one in imports(code)
        for name in one.names or ("",)
    )


def imported_parts(code: types.CodeType) -> frozenset[str]:
    """`module:name` for each `from module import name`, nested code included."""
    return frozenset(f"{one.module}:{name}" for one in imports(code) if not one.level for name in one.names)


def _nested(code: types.CodeType, find: Callable[[types.CodeType], frozenset[Found]]) -> frozenset[Found]:
    inner = [find(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset().union(*inner)


# ---- callables


def plain(function: Callable[..., Any]) -> Any:
    """The function that runs in the end: under partials, and the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    return type(function).__call__


def is_async(function: Callable[..., Any]) -> bool:
    """True for a function that gives a coroutine."""
    return inspect.iscoroutinefunction(plain(function))


def how_it_yields(function: Callable[..., Any]) -> str:
    """How a function gives a generator or a context manager instead of a value, in words; empty if it does not."""
    found = plain(function)
    if _yields(found):
        return "a generator function (it contains `yield`)"
    code, inner = getattr(found, "__code__", None), getattr(found, "__wrapped__", None)
    if code is not None and code.co_filename == contextlib.__file__ and _yields(inner):
        return "a context manager (of contextlib)"
    return ""


def gives_pieces(function: Callable[..., Any]) -> bool:
    """True for a generator function, plain or async."""
    return _yields(plain(function))


def _yields(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


# ---- source lines


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
