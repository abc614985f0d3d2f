"""What a function takes along by value, and whether it has changed since.

A function of the user's own is pickled once, with its default arguments and the globals and helpers that it uses.
Programs bind these again and change them in place all the time (a cell that is run anew, a network in training), so
before a call is sent each is compared with what it was: functions by identity and code, atoms by value, anything else
by its content (`fingerprint`).

Values are held weakly where Python allows it, so a helper that names the function itself does not keep it alive.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from stoker.contexts.bytecode import global_names
from stoker.contexts.fingerprint import Fingerprint
from stoker.contexts.own_attributes import MISSING, bases_of, is_users_class, members_of, own_attribute
from stoker.contexts.reducers import is_dispatcher
from stoker.contexts.user_code import is_installed
from stoker.contexts.walk_plans import ATOMS, counts_by_identity

_HELPERS = 256
"""More helpers of helpers than this are not followed."""

Reader = Callable[[Any, Any], Any]


class Captured:
    """What a function and the user's own functions that it uses rested on, at the time of its making."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._helpers: list[tuple[weakref.ref[types.FunctionType], _Function]] = []
        start = _plain(function)
        self._is_plain = start is function
        self._own = _Function(start) if start is not None else None
        self._object = _Binding("what it holds", _itself, 0, function) if start is None else None
        seen, waiting = {id(start)}, deque(() if start is None else _helpers(start))
        if not self._is_plain:
            waiting += _functions_in(function)
        while waiting and len(self._helpers) < _HELPERS:
            helper = waiting.popleft()
            if id(helper) not in seen:
                seen.add(id(helper))
                self._helpers.append((weakref.ref(helper), _Function(helper)))
                waiting += _helpers(helper)

    def changed(self, function: Callable[..., Any]) -> str:
        """The first name whose value is another one now, empty if there is none. `function` is that of the making."""
        start: Any = function if self._is_plain else _plain(function)
        name = self._own.changed(start) if self._own is not None and start is not None else ""
        if name or (self._object is not None and not self._object.holds(function)):
            return name or "what it holds"
        for helper, known in self._helpers:
            alive = helper()
            name = known.changed(alive) if alive is not None else ""  # else a name above is bound to another one
            if name:
                return name
        return ""


class _Function:
    """What one function rested on: its code, what its names stood for, and its attributes."""

    __slots__ = ("_attributes", "_bindings", "_code")

    def __init__(self, function: types.FunctionType) -> None:
        self._code = function.__code__
        self._bindings = list(_bindings(function))
        has_own = function.__dict__ and not is_dispatcher(function)
        self._attributes = Fingerprint(function.__dict__) if has_own else None

    def changed(self, function: types.FunctionType) -> str:
        """The first name that stands for something else now, empty if there is none."""
        for binding in self._bindings:
            if not binding.holds(function):
                return binding.name
        if function.__code__ is not self._code:
            return function.__name__
        attributes = function.__dict__ if not is_dispatcher(function) else None
        same = not attributes if self._attributes is None else self._attributes.matches(attributes)
        return "" if same else f"the attributes of {function.__name__}"


class _Binding:
    """A name that a function uses, and what it stood for."""

    __slots__ = ("_at", "_fingerprint", "_read", "_ref", "_value", "name")

    def __init__(self, name: str, read: Reader, at: Any, function: Any) -> None:
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
            try:
                self._ref = weakref.ref(value)
            except TypeError:
                self._value = value
        else:
            self._fingerprint = Fingerprint(value)

    def holds(self, function: Any) -> bool:
        """True while the name stands for the same as at first."""
        value = self._read(function, self._at)
        if value is self._value:
            return True
        if self._ref is not None:
            return self._ref() is value
        if self._fingerprint is not None:
            return self._fingerprint.matches(value)
        kind = type(value)
        if kind is not type(self._value) or id(kind) not in ATOMS:
            return False
        return str(value) == str(self._value) if kind is float else bool(value == self._value)  # NaN, -0.0


_HELD_WEAKLY = object()


def _bindings(function: types.FunctionType) -> Iterator[_Binding]:
    if is_dispatcher(function):
        yield _Binding(function.__name__, _implementations, 0, function)
        return
    code = function.__code__
    for name, read, at in _variables(function):
        value = read(function, at)
        if value is not function and not (type(value) is types.ModuleType and counts_by_identity(value)):
            yield _Binding(name, read, at, function)
    defaults = function.__defaults__ or ()
    for at, name in enumerate(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]):
        yield _Binding(name, _default, at, function)
    for name in function.__kwdefaults__ or ():
        yield _Binding(name, _keyword_default, name, function)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Reader, Any]]:
    """The globals and the variables of enclosing functions that a function uses: their names, how and where to read."""
    for name in sorted(global_names(function.__code__)):
        yield name, _global, name
    for place, name in enumerate(function.__code__.co_freevars):
        yield name, _cell, place


def _implementations(function: Any, _at: int) -> Any:
    return dict(function.registry)


def _itself(function: Any, _at: int) -> Any:
    return function


def _global(function: types.FunctionType, name: str) -> Any:
    return function.__globals__.get(name, MISSING)


def _cell(function: types.FunctionType, at: int) -> Any:
    try:
        return (function.__closure__ or ())[at].cell_contents
    except (IndexError, ValueError):  # an empty cell
        return MISSING


def _default(function: types.FunctionType, at: int) -> Any:
    try:
        return (function.__defaults__ or ())[at]
    except IndexError:
        return MISSING


def _keyword_default(function: types.FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {}).get(name, MISSING)


# ---- helpers: the user's own functions among what a function uses, which travel with it


def _helpers(function: types.FunctionType) -> Iterator[types.FunctionType]:
    for _, read, at in _variables(function):
        yield from _functions_in(read(function, at))


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The user's own function in a value, or the methods of a user's class or of the class of an instance."""
    if type(value) is functools.partial:
        value = value.func
    if type(value) is types.FunctionType and is_dispatcher(value):
        yield value
        for implementation in value.registry.values():  # type: ignore[attr-defined]
            yield from _functions_in(implementation)
        return
    helper = _plain(value)
    if helper is not None:
        yield helper
        return
    kind = value if issubclass(type(value), type) else type(value)
    for base in bases_of(kind) if is_users_class(kind) else ():
        for member in members_of(base).values() if is_users_class(base) else ():
            for part in _parts_of_member(member):
                if type(part) is types.FunctionType or own_attribute(part, "__wrapped__") is not None:
                    yield from _functions_in(part)


def _parts_of_member(member: Any) -> tuple[Any, ...]:
    """The functions in a member of a class."""
    if type(member) is property:
        return member.fget, member.fset
    if type(member) is functools.cached_property or type(member) is functools.partialmethod:
        return (member.func,)
    if type(member) is functools.singledispatchmethod:
        return (member.dispatcher,)
    return (member.__func__,) if type(member) is staticmethod or type(member) is classmethod else (member,)


def _plain(value: Any) -> types.FunctionType | None:
    """The user's own function in a value, under the wrappers of decorators; None if there is none."""
    if type(value) is types.FunctionType and "__wrapped__" not in value.__dict__:
        return value if not is_installed(value.__module__ or "") else None
    for _ in range(8):
        inner = own_attribute(value, "__wrapped__")
        if inner is None:
            break
        value = inner
    if type(value) is types.FunctionType and not is_installed(value.__module__ or ""):
        return value
    return None


# ---- recipes

_MADE = 256
_made: OrderedDict[str, tuple[weakref.ref[Any], Captured]] = OrderedDict()
"""The loaders of the recipes that this program made last, by key."""


def made_recipe(key: str, loader: Callable[..., Any]) -> None:
    """Remember what a loader rests on when a recipe is made of it."""
    if _plain(loader) is None and counts_by_identity(loader):
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
