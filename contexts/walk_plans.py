"""How the walk of a fingerprint reads the instances of a class: found out once, and kept while the class lives."""

from __future__ import annotations

import enum
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from stoker.contexts.array_facts import Reader, has_attributes, is_index, is_torch_module, reader_of
from stoker.contexts.own_attributes import MISSING, Layout, globals_of, home_of, is_users_class, layout_of
from stoker.contexts.user_code import is_installed

ATOMS = frozenset(map(id, (int, str, float, bool, bytes, complex, type(None), type(...))))
"""The ids of classes whose instances compare by value. By id, since a metaclass may define `__hash__`."""
_NAMED = (enum.Enum, logging.Logger, types.CodeType)
"""They do not change, or travel by their names."""
_WEAK = frozenset(map(id, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)))
"""Caches, such as that of `functools.singledispatch`, which never travel."""
_OPAQUE_HOMES = frozenset({"stoker", "parsl"})


class ReadingWay(enum.Enum):
    """How a value is read."""

    IDENTITY = enum.auto()
    FUNCTION = enum.auto()
    CLASS = enum.auto()
    MODULE = enum.auto()
    BUILTIN = enum.auto()
    READER = enum.auto()
    TORCH_MODULE = enum.auto()
    OBJECT = enum.auto()


class WalkPlan(NamedTuple):
    """How the instances of a class are read. `users_class`: the class is the user's own, and read as well."""

    way: ReadingWay
    users_class: bool
    layout: Layout
    reader: Reader | None
    alive: weakref.ref[type]


_plans: dict[int, WalkPlan] = {}
_NOTHING = Layout(None, ())


def plan_of(kind: type) -> WalkPlan:
    """How the instances of this class are read."""
    plan = _plans.get(id(kind))
    if plan is None or plan.alive() is not kind:
        key = id(kind)
        alive = weakref.ref(kind, lambda _: _plans.pop(key, None))
        way, reader = _way_of(kind), reader_of(kind)
        if way is ReadingWay.OBJECT and reader is not None:
            way = ReadingWay.READER
        walked = way in (ReadingWay.OBJECT, ReadingWay.TORCH_MODULE) or (reader is not None and has_attributes(reader))
        layout = layout_of(kind) if walked else _NOTHING
        plan = _plans[key] = WalkPlan(way, way is not ReadingWay.CLASS and is_users_class(kind), layout, reader, alive)
    return plan


def _way_of(kind: type) -> ReadingWay:
    if kind is types.FunctionType:
        return ReadingWay.FUNCTION
    if issubclass(kind, type):
        return ReadingWay.CLASS
    if issubclass(
        kind, types.ModuleType
    ):  # a subclass of the module type too: some libraries import their parts on first use
        return ReadingWay.MODULE
    if issubclass(kind, types.BuiltinFunctionType):
        return ReadingWay.BUILTIN
    if (
        id(kind) in _WEAK
        or issubclass(kind, _NAMED)
        or is_index(kind)
        or home_of(kind).partition(".")[0] in _OPAQUE_HOMES
    ):
        return ReadingWay.IDENTITY
    return ReadingWay.TORCH_MODULE if is_torch_module(kind) else ReadingWay.OBJECT


def counts_by_identity(value: Any) -> bool:
    """True for what a walk does not look into: functions, installed classes and modules, enums, recipes, apps.

    A bound method of a builtin class, such as `table.get`, is looked into: its object may change.
    """
    way = plan_of(type(value)).way
    if way is ReadingWay.CLASS:
        return not is_users_class(value) or issubclass(value, enum.Enum)
    if way is ReadingWay.MODULE:
        return not _is_users_module(value)
    if way is ReadingWay.BUILTIN:
        owner = owner_of(value)
        return owner is None or issubclass(type(owner), types.ModuleType)
    return way is ReadingWay.IDENTITY or way is ReadingWay.FUNCTION or value is MISSING


owner_of: Callable[[Any], Any] = vars(types.BuiltinFunctionType)["__self__"].__get__
"""What a builtin function is bound to: its module, or the object whose method it is."""


def _is_users_module(module: types.ModuleType) -> bool:
    """True for a module of the user's own, which travels with its globals."""
    name = globals_of(module).get("__name__")
    if type(name) is not str or name in ("__main__", "__mp_main__"):
        return False
    return name in sys.modules and not is_installed(name)
