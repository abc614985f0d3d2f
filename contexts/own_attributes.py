"""What an object and its class hold, read without running code of the user's.

`vars(value)`, `value.x`, `kind.__module__` and `isinstance` may run a property, `__getattr__`, or a metaclass. The
functions here read the dictionaries and slots where CPython keeps them.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from stoker.contexts.user_code import is_installed

_POINTER_BYTES = struct.calcsize("P")
MISSING = object()
"""Stands for a slot that is not set."""

_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_members: Callable[[type], types.MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__

globals_of: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
"""The globals of a module."""


def bases_of(kind: type) -> tuple[type, ...]:
    """The class and its bases, in the order of their lookup."""
    return _mro(kind)


def members_of(kind: type) -> types.MappingProxyType[str, Any]:
    """What the class itself defines."""
    return _members(kind)


def home_of(kind: type) -> str:
    """The module that a class says it lies in; `builtins` for a class that says nothing."""
    home = _members(kind).get("__module__")
    return home if type(home) is str else "builtins"


def is_users_class(kind: type) -> bool:
    """True for a class that travels by value."""
    return not is_installed(home_of(kind))


class Layout(NamedTuple):
    """Where the instances of a class keep their attributes."""

    dictionary: Callable[[Any], dict[str, Any]] | None
    slots: tuple[tuple[str, Callable[[Any], Any]], ...]
    has_hidden_state: bool = False
    """The instances hold more than an `object`, attributes and slots: fields of C, which Python may not show."""


def layout_of(kind: type) -> Layout:
    """Where the instances of this class keep their attributes."""
    dictionary = None
    slots: list[tuple[str, Callable[[Any], Any]]] = []
    own_fields = (_field(kind, "__dictoffset__") > 0) + (_field(kind, "__weakrefoffset__") > 0)
    for base in _mro(kind):
        members = _members(base)
        if "__slots__" in members:  # a class of Python; one of C may show its fields, and hide others
            own_fields += sum(type(member) is types.MemberDescriptorType for member in members.values())
        for name, member in members.items():
            if type(member) is types.MemberDescriptorType:
                slots.append((name, member.__get__))
            elif name == "__dict__" and dictionary is None and type(member) is types.GetSetDescriptorType:
                dictionary = member.__get__
    plain_bytes = object.__basicsize__ + own_fields * _POINTER_BYTES
    hidden = _field(kind, "__basicsize__") > plain_bytes or _field(kind, "__itemsize__") > 0
    return Layout(dictionary, tuple(slots), hidden)


def _field(kind: type, name: str) -> int:
    """A number about the instances of a class, without its metaclass."""
    return int(type.__dict__[name].__get__(kind))


def slot(read: Callable[[Any], Any], value: Any) -> Any:
    """The content of a slot; MISSING if it is not set."""
    try:
        return read(value)
    except AttributeError:
        return MISSING


def cell_content(cell: types.CellType) -> Any:
    """The value of a variable that inner functions share; MISSING if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def own_attribute(value: Any, name: str) -> Any:
    """The attribute in the instance's own dictionary; None if it has none."""
    kind = type(value)
    for base in _mro(kind):
        member = _members(base).get("__dict__")
        if type(member) is types.GetSetDescriptorType:
            found = member.__get__(value)
            return dict.get(found, name) if isinstance(found, dict) else None
    return None
