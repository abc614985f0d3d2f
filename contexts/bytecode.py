"""What code refers to, read from its bytecode: globals, modules that it imports, names that it takes from them."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Names of globals that code refers to, nested code included."""
    names = frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname in _GLOBAL_OPS)
    return names | _nested(code, global_names)


@functools.lru_cache(maxsize=1024)
def imported_names(code: types.CodeType) -> frozenset[str]:
    """Dotted names of modules that code imports when it runs, nested code included."""
    names = frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    return (names | _nested(code, imported_names)) - {""}


@functools.lru_cache(maxsize=1024)
def imported_parts(code: types.CodeType) -> frozenset[str]:
    """`module:name` for each `from module import name`, nested code included."""
    names, module = set[str](), ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = str(step.argval)
        elif step.opname == "IMPORT_FROM" and module:
            names.add(f"{module}:{step.argval}")
    return frozenset(names) | _nested(code, imported_parts)


def _nested(code: types.CodeType, find: Callable[[types.CodeType], frozenset[str]]) -> frozenset[str]:
    inner = [find(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset().union(*inner)
