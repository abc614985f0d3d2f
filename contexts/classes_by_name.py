"""Classes of modules that have travelled: they go by name, so that there is one of each.

A function that imports `Color` in its body compares it with the `Color` that it was given: both must be the class of
the module that travelled with the function. What the program has set on the class goes along, as far as it is simple.
"""

from __future__ import annotations

import enum
import importlib
import sys
from typing import Any

_SIMPLE = frozenset({int, str, float, bool, bytes, complex, type(None)})
_CONTAINERS = frozenset({tuple, list, set, frozenset, dict})
_MOST_PARTS = 64


def is_found_by_name(kind: type) -> bool:
    """Whether a class is what its module has under its name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is kind


def simple_attributes(kind: type) -> dict[str, Any]:
    """Attributes of a class itself that are numbers, texts or small containers of these."""
    if isinstance(kind, enum.EnumMeta):
        return {}
    return {name: part for name, part in vars(kind).items() if not name.startswith("__") and _is_simple(part)}


def class_by_name(module: str, name: str, attributes: dict[str, Any]) -> Any:
    """The class of this name, with these attributes."""
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    for attribute, value in attributes.items():
        here = vars(kind).get(attribute)
        if type(here) is not type(value) or here != value:
            setattr(kind, attribute, value)
    return kind


def _is_simple(part: Any) -> bool:
    if type(part) in _SIMPLE:
        return True
    if type(part) not in _CONTAINERS or len(part) > _MOST_PARTS:
        return False
    parts = [*part.keys(), *part.values()] if type(part) is dict else part
    return all(type(each) in _SIMPLE for each in parts)
