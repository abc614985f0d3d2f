"""What a function takes along by value, and whether it has changed since.

A function of the user's own is pickled once, with the globals and helpers that it uses. In a notebook these are bound
again all the time, so before a call is sent the bindings are compared with those of the last time: by identity, numbers
and texts by value, small lists, dicts and sets by their elements. A change inside a larger object is not seen.

Values are held weakly where Python allows it, so a helper that names the function itself does not keep it alive.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from stoker.contexts.unpicklable import global_names
from stoker.contexts.user_code import is_installed

_ATOMS = frozenset({int, str, float, bool, bytes, complex, type(None)})
_CONTAINERS = frozenset({list, dict, set, tuple, frozenset})
_WIDTH = 64
_HELPERS = 64
"""More helpers of helpers than this are not followed."""


class Captured:
    """The bindings of a function and of the user's own functions that it uses, at the time of its making."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._own: list[_Binding] = []
        self._helpers: list[tuple[weakref.ref[types.FunctionType], list[_Binding]]] = []
        start = _plain(function)
        if start is None:
            return
        self._own = list(_bindings(start))
        seen, waiting = {id(start)}, list(_helpers(start))
        while waiting and len(self._helpers) < _HELPERS:
            helper = waiting.pop()
            if id(helper) not in seen:
                seen.add(id(helper))
                self._helpers.append((weakref.ref(helper), list(_bindings(helper))))
                waiting += _helpers(helper)

    def changed(self, function: Callable[..., Any]) -> str:
        """The first name that is bound to something else now, empty if none is. `function` is that of the making."""
        start = _plain(function)
        if start is None:
            return ""
        for binding in self._own:
            if not binding.holds(start):
                return binding.name
        for helper, bindings in self._helpers:
            alive = helper()
            if alive is None:  # then a name above is bound to another one
                continue
            for binding in bindings:
                if not binding.holds(alive):
                    return binding.name
        return ""


class _Binding:
    """A name that a function uses, and what it was bound to."""

    __slots__ = ("_cell", "_elements", "_ref", "_value", "name")

    def __init__(self, name: str, value: Any, *, cell: int | None) -> None:
        self.name = name
        self._cell = cell
        self._ref: weakref.ref[Any] | None = None
        self._value: Any = None
        self._elements = _elements(value)
        if type(value) in _ATOMS:
            self._value = value
        else:
            try:
                self._ref = weakref.ref(value)
            except TypeError:
                self._value = value

    def holds(self, function: types.FunctionType) -> bool:
        """True while the function's name is bound to the same as at first."""
        value = _value_of(function, self.name, self._cell)
        if self._ref is not None:  # a set takes weak references too
            return self._ref() is value and _same(self._elements, _elements(value))
        if type(value) in _ATOMS:
            return type(value) is type(self._value) and (value == self._value or value != value)
        return value is self._value and _same(self._elements, _elements(value))


_MISSING = object()


def _bindings(function: types.FunctionType) -> Iterator[_Binding]:
    for name in dict.fromkeys(global_names(function.__code__)):
        value = function.__globals__.get(name, _MISSING)
        if not isinstance(value, types.ModuleType) and value is not function:
            yield _Binding(name, value, cell=None)
    for place, name in enumerate(function.__code__.co_freevars):
        value = _value_of(function, name, place)
        if value is not function:
            yield _Binding(name, value, cell=place)


def _value_of(function: types.FunctionType, name: str, cell: int | None) -> Any:
    if cell is None:
        return function.__globals__.get(name, _MISSING)
    try:
        return (function.__closure__ or ())[cell].cell_contents
    except (IndexError, ValueError):  # an empty cell
        return _MISSING


def _helpers(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The user's own functions among what a function uses: they travel with it."""
    names = [(name, None) for name in dict.fromkeys(global_names(function.__code__))]
    cells = [(name, place) for place, name in enumerate(function.__code__.co_freevars)]
    for name, cell in [*names, *cells]:
        helper = _plain(_value_of(function, name, cell))
        if helper is not None:
            yield helper


def _plain(value: Any) -> types.FunctionType | None:
    """The user's own function in a value, under the wrappers of decorators; None if there is none."""
    for _ in range(8):
        inner = getattr(value, "__wrapped__", None)
        if inner is None:
            break
        value = inner
    if isinstance(value, types.FunctionType) and not is_installed(value.__module__ or ""):
        return value
    return None


def _elements(value: Any) -> tuple[Any, ...] | None:
    """The elements of a small container; None for anything else."""
    if type(value) not in _CONTAINERS or len(value) > _WIDTH:
        return None
    return tuple(value.items()) if type(value) is dict else tuple(value)


def _same(before: tuple[Any, ...] | None, now: tuple[Any, ...] | None) -> bool:
    if before is None or now is None:
        return before is now
    if len(before) != len(now):
        return False
    return all(_is_one(one, other) for one, other in zip(before, now, strict=True))


def _is_one(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other) == 2:  # an item of a dict
        return _is_one(one[0], other[0]) and _is_one(one[1], other[1])
    return one is other or (type(one) in _ATOMS and type(one) is type(other) and bool(one == other))


# ---- recipes

_MADE = 256
_made: OrderedDict[str, tuple[weakref.ref[Any], Captured]] = OrderedDict()
"""The loaders of the recipes that this program made last, by key."""


def made_recipe(key: str, loader: Callable[..., Any]) -> None:
    """Remember what a loader rests on when a recipe is made of it."""
    if _plain(loader) is None:
        return
    try:
        _made[key] = (weakref.ref(loader), Captured(loader))
    except TypeError:
        return
    _made.move_to_end(key)
    if len(_made) > _MADE:
        _made.popitem(last=False)


def changed_since_made(key: str) -> str:
    """The first name that the loader of a recipe uses and that has changed since the recipe was made, or empty."""
    known = _made.get(key)
    loader = known[0]() if known is not None else None
    return known[1].changed(loader) if known is not None and loader is not None else ""
