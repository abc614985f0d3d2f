"""What a function takes along by value, and whether it has changed since.

A function of the user's own is pickled once, with its default arguments and the globals and helpers that it uses.
Programs bind these again and change them in place all the time (a cell that is run anew, a network in training), so
before a call is sent each is compared with what it was: functions by identity and code, atoms by value, anything else
by its content (`fingerprint`). The user's functions among these values (`helpers`) are compared likewise.

Values are held weakly where Python allows it, so a helper that names the function itself does not keep it alive.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from stoker.contexts.array_facts import Meter
from stoker.contexts.bytecode import global_names
from stoker.contexts.fingerprint import Fingerprint
from stoker.contexts.helpers import HelperSearch, Place, has_installed_globals, own_function
from stoker.contexts.own_attributes import MISSING, cell_content
from stoker.contexts.reducers import is_dispatcher
from stoker.contexts.walk_plans import ATOMS, counts_by_identity

_HELPERS = 256
"""More helpers of helpers than this are not followed."""

Reader = Callable[[Any, Any], Any]


class CapturedState:
    """What a function and the user's own functions that it uses rested on, at the time of its making."""

    def __init__(self, function: Callable[..., Any]) -> None:
        search = HelperSearch()
        start = own_function(function)
        self._is_plain = start is function
        self._own = None
        self._object = None
        if start is None:
            self._object = _Binding("what it holds", _itself, 0, function, search)
        else:
            search.meet(start)  # it is the first helper, and no helper of its helpers
            self._own = _Function(start, search)
        self._helpers: list[tuple[weakref.ref[types.FunctionType], _Function]] = []
        for helper in itertools.islice(search.helpers(), _HELPERS):
            if helper is not start:
                self._helpers.append((weakref.ref(helper), _Function(helper, search)))

    def changed(self, function: Callable[..., Any]) -> str:
        """The first name whose value is another one now, empty if there is none. `function` is that of the making."""
        start: Any = function if self._is_plain else own_function(function)
        meter = Meter()
        if self._object is not None and not self._object.holds(function, meter):
            return self._object.name
        if self._own is not None:
            name = self._own.changed(start, meter) if start is not None else self._own.name
            if name:
                return name
        for helper, known in self._helpers:
            alive = helper()
            name = known.changed(alive, meter) if alive is not None else known.name
            if name:
                return name
        return ""


class _Function:
    """What one function rested on: its code, what its names stood for, and its attributes."""

    __slots__ = ("_attributes", "_bindings", "_code", "name")

    def __init__(self, function: types.FunctionType, search: HelperSearch) -> None:
        self.name = function.__name__
        self._code = function.__code__
        self._bindings = list(_bindings(function, search))
        attributes = function.__dict__
        self._attributes = Fingerprint(attributes, meter=search.meter, met=search.met) if attributes else None

    def changed(self, function: types.FunctionType, meter: Meter) -> str:
        """The first name that stands for something else now, empty if there is none."""
        for binding in self._bindings:
            if not binding.holds(function, meter):
                return binding.name
        if function.__code__ is not self._code:
            return self.name
        attributes = function.__dict__
        same = not attributes if self._attributes is None else self._attributes.matches(attributes, meter)
        if same:
            return ""
        return self.name if is_dispatcher(function) else f"the attributes of {self.name}"  # or its implementations


class _Binding:
    """A name that a function uses, and what it stood for."""

    __slots__ = ("_at", "_fingerprint", "_read", "_ref", "_value", "name")

    def __init__(self, name: str, read: Reader, at: Any, function: Any, search: HelperSearch) -> None:
        self.name = name
        self._read = read
        self._at = at
        self._ref: weakref.ref[Any] | None = None
        self._value: Any = _HELD_WEAKLY
        self._fingerprint: Fingerprint | None = None
        value = read(function, at)
        if id(type(value)) in ATOMS:
            self._value = value
        elif counts_by_identity(value):
            search.meet(value)
            try:
                self._ref = weakref.ref(value)
            except TypeError:
                self._value = value
        else:
            self._fingerprint = Fingerprint(value, meter=search.meter, met=search.met)

    def holds(self, function: Any, meter: Meter) -> bool:
        """True while the name stands for the same as at first."""
        value = self._read(function, self._at)
        if value is self._value:
            return True
        if self._ref is not None:
            return self._ref() is value
        if self._fingerprint is not None:
            return self._fingerprint.matches(value, meter)
        kind = type(value)
        if kind is not type(self._value) or id(kind) not in ATOMS:
            return False
        return str(value) == str(self._value) if kind is float else bool(value == self._value)  # NaN, -0.0


_HELD_WEAKLY = object()


def _bindings(function: types.FunctionType, search: HelperSearch) -> Iterator[_Binding]:
    """The names that a function uses. One that an earlier function uses too is looked at there."""
    code = function.__code__
    for name, read, at, place in _variables(function):
        value = read(function, at)
        if value is function or (issubclass(type(value), types.ModuleType) and counts_by_identity(value)):
            continue
        if search.is_new(place):
            yield _Binding(name, read, at, function, search)
    defaults = function.__defaults__ or ()
    for at, name in enumerate(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]):
        yield _Binding(name, _default, at, function, search)
    for name in function.__kwdefaults__ or ():
        yield _Binding(name, _keyword_default, name, function, search)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Reader, Any, Place]]:
    """The globals and the variables of enclosing functions that a function uses: name, how, at what, and from where
    it is read. The globals of a wrapper that an installed decorator made are left out."""
    if not has_installed_globals(function):
        for name in sorted(global_names(function.__code__)):
            yield name, _global, name, (id(function.__globals__), name)
    for at, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)):
        yield name, _cell, at, (id(cell), "")


def _itself(function: Any, _at: int) -> Any:
    return function


def _global(function: types.FunctionType, name: str) -> Any:
    return function.__globals__.get(name, MISSING)


def _cell(function: types.FunctionType, at: int) -> Any:
    cells = function.__closure__ or ()
    return cell_content(cells[at]) if at < len(cells) else MISSING


def _default(function: types.FunctionType, at: int) -> Any:
    try:
        return (function.__defaults__ or ())[at]
    except IndexError:
        return MISSING


def _keyword_default(function: types.FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {}).get(name, MISSING)


# ---- recipes

_MADE = 256
_made: OrderedDict[str, tuple[weakref.ref[Any], CapturedState]] = OrderedDict()
"""The loaders of the recipes that this program made last, by key."""


def made_recipe(key: str, loader: Callable[..., Any]) -> None:
    """Remember what a loader rests on when a recipe is made of it."""
    if own_function(loader) is None and counts_by_identity(loader):
        return
    try:
        _made[key] = (weakref.ref(loader), CapturedState(loader))
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
