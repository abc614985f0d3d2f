"""What code refers to, read from its bytecode: globals, modules that it imports, names that it takes from them.

An import is the three instructions of every Python since 3.6: its level, its names, IMPORT_NAME.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import NamedTuple, TypeVar

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
    """What code imports when it runs, nested code included."""
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
    """Whether code may read what lies beside it: then another folder's is another one."""
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
