"""The loaders that recipes of this process were made of, and their arguments: for the advisor.

A recipe is a value that may have come from elsewhere; its loader travels in it as bytes. Here is what this process
knows besides. Loaders are held weakly.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_MOST = 1_000
_LONGEST = 300
_made: OrderedDict[str, tuple[weakref.ref[Any], dict[str, Any]]] = OrderedDict()


def made(key: str, loader: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A recipe of this key was made of a loader. What cannot be held weakly, or bound by name, is not remembered."""
    try:
        bound = inspect.signature(loader).bind(*args, **kwargs)
        bound.apply_defaults()
        plain = {
            name: value
            for name, value in bound.arguments.items()
            if value is None or (isinstance(value, str | int | float | bool) and len(str(value)) <= _LONGEST)
        }
        _made[key] = (weakref.ref(loader), plain)
    except (TypeError, ValueError):
        return
    _made.move_to_end(key)
    if len(_made) > _MOST:
        _made.popitem(last=False)


def loader_of(key: str) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The loader of a recipe and those of its arguments that are plain values; None if this process does not know."""
    known = _made.get(key)
    loader = known[0]() if known is not None else None
    return (loader, known[1]) if known is not None and loader is not None else None
