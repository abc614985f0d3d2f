"""Which modules a loader imports, read from its bytecode; and importing them ahead in a process that will fork.

An entry is a module's name (`torch`), or `module:attribute` (`transformers:AutoModelForCausalLM`) for packages that
import their parts on first use: touching the attribute is what makes the import happen.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Iterable
from typing import Any

from stoker.contexts.bytecode import global_names, imported_names, imported_parts
from stoker.contexts.carried_modules import note_linked_packages
from stoker.contexts.user_code import is_installed, source_of

_ORDER_FIRST = ("torch", "transformers")


def modules_of(loader: Any) -> tuple[str, ...]:
    """Top-level modules that a loader imports (nested functions too) or refers to as globals, then `module:attribute`.

    Modules of the user's own and of the standard library are left out: the first may not be there, the second are
    cheap.
    """
    while isinstance(loader, functools.partial):
        loader = loader.func
    loader = getattr(loader, "__func__", loader)
    code = getattr(loader, "__code__", None)
    if not isinstance(code, types.CodeType):
        return _tidy([str(getattr(loader, "__module__", ""))], [])
    modules = [name.partition(".")[0] for name in imported_names(code) if source_of(name) is None]
    parts = [part for part in sorted(imported_parts(code)) if source_of(part.partition(":")[0]) is None]
    for name in sorted(global_names(code) & loader.__globals__.keys()):
        value = loader.__globals__[name]
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and is_installed(home):
            modules.append(home.partition(".")[0])
    return _tidy(modules, parts)


def import_for(names: Iterable[str]) -> dict[str, str]:
    """Import what a recipe's `preload` names. Returns what could not be, with the reason; raises nothing."""
    failed: dict[str, str] = {}
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            found = importlib.import_module(module)
            if attribute:
                getattr(found, attribute)
        except Exception as error:  # an import runs code that may raise whatever it likes
            failed[name] = f"{type(error).__name__}: {error}"
    note_linked_packages()
    return failed


def _tidy(modules: list[str], parts: list[str]) -> tuple[str, ...]:
    def wanted(name: str) -> bool:
        top = name.partition(":")[0].partition(".")[0]
        return bool(top) and top not in ("stoker", "__future__", "__main__") and not _in_stdlib(top)

    tops = sorted({name for name in modules if wanted(name)}, key=lambda name: (name not in _ORDER_FIRST, name))
    return (*tops, *sorted({name for name in parts if wanted(name)}))


def _in_stdlib(top: str) -> bool:
    return top in sys.stdlib_module_names
