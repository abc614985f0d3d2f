"""How objects of the user's own travel that cloudpickle sends by name alone, in part, or not at all.

A reducer answers as `__reduce_ex__` does, or None to leave the object to cloudpickle. A cache, a dispatching function
or a cell may refer to itself through its function; pickle copes, since the function is remembered before its globals
are written. Type variables and sentinels are compared with `is`: each is one object in a process, by an id of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import threading
import types
import typing
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle as _inside

CACHED = type(functools.lru_cache(len))
"""The class of functions under `functools.cache` and `lru_cache`."""
_DISPATCHER = functools.singledispatch(len).__code__  # type: ignore[attr-defined]  # it is a function


def is_dispatcher(function: types.FunctionType) -> bool:
    """True for a function under `functools.singledispatch`."""
    return function.__code__ is _DISPATCHER and hasattr(function, "registry")


# ---- functions


def _reduce_cached(value: Any) -> Any:
    if not hasattr(value, "cache_parameters"):  # made by hand
        return None
    options = value.cache_parameters()
    attributes = {name: part for name, part in vars(value).items() if name not in ("__wrapped__", "cache_parameters")}
    return new_cached, (value.__wrapped__, options["maxsize"], options["typed"]), attributes


def new_cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """A function behind an empty cache."""
    return functools.lru_cache(maxsize, typed)(function)


def reduce_dispatcher(function: Any) -> Any:
    """How to rebuild a function under `functools.singledispatch`."""
    own = ("__wrapped__", "register", "dispatch", "registry", "_clear_cache")
    attributes = {name: part for name, part in vars(function).items() if name not in own}
    state = attributes, list(function.registry.items())
    return functools.singledispatch, (function.__wrapped__,), state, None, None, fill_dispatcher


def fill_dispatcher(function: Any, state: tuple[dict[str, Any], list[tuple[type, Any]]]) -> None:
    """Give a dispatching function its attributes and its implementations."""
    attributes, implementations = state
    vars(function).update(attributes)
    for kind, implementation in implementations:
        function.register(kind, implementation)


def _reduce_cached_property(value: Any) -> Any:
    attributes = {name: part for name, part in vars(value).items() if name not in ("func", "lock")}
    return functools.cached_property, (value.func,), attributes


def _reduce_cell(cell: types.CellType) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:  # empty
        return types.CellType, ()
    return types.CellType, (), (content,), None, None, fill_cell


def fill_cell(cell: types.CellType, state: tuple[Any]) -> None:
    """Bind the variable that functions share."""
    cell.cell_contents = state[0]


# ---- classes


def class_reduction(kind: type) -> Any:
    """How to rebuild a class by value, its slots with it: Python makes them together with the class, or never.

    Raises PicklingError for a class that can't be rebuilt so.
    """
    if getattr(kind, "__struct_fields__", None):
        raise pickle.PicklingError(
            f"{kind.__qualname__} is a msgspec.Struct, which goes by its name: define it in a module that the function"
            " imports in its body, or make it a dataclass"
        )
    if wanted := _wanted_by_bases(kind):
        raise pickle.PicklingError(
            f"{kind.__qualname__} was made with {wanted!r} for __init_subclass__, which Python does not keep: define it"
            " in a module that the function imports in its body, or give that parameter a default"
        )
    reduced = _inside._dynamic_class_reduce(kind)
    bases = vars(kind).get("__orig_bases__", ())
    if reduced[0] is _inside._make_skeleton_class and "__slots__" in vars(kind) and typing.NamedTuple not in bases:
        reduced[1][3]["__slots__"] = vars(kind)["__slots__"]
    return reduced


def _wanted_by_bases(kind: type) -> str:
    """A keyword that `__init_subclass__` of a base must be given, or empty."""
    hook: Any = getattr(super(kind, kind), "__init_subclass__", None)
    if not isinstance(hook, types.MethodType):
        return ""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [one.name for one in parameters if one.default is one.empty and one.kind not in _COLLECTING]
    return bare[0] if bare else ""


_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# ---- what is compared with `is`


def _reduce_type_variable(value: Any) -> Any:
    kind = type(value)
    arguments, options = (value.__name__,), dict[str, Any]()
    if kind is typing.TypeVar:
        arguments = (value.__name__, *value.__constraints__)
    if kind is not typing.TypeVarTuple:
        options = {
            "bound": value.__bound__,
            "covariant": value.__covariant__,
            "contravariant": value.__contravariant__,
        }
    identity = _inside._get_or_create_tracker_id(value)
    return new_named, (kind, arguments, options, {"__module__": value.__module__}, identity)


def _reduce_new_type(value: Any) -> Any:
    attributes = {name: part for name, part in vars(value).items() if name != "__supertype__"}
    identity = _inside._get_or_create_tracker_id(value)
    return new_named, (typing.NewType, (value.__name__, value.__supertype__), {}, attributes, identity)


def new_named(
    kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], attributes: dict[str, Any], identity: str
) -> Any:
    """A type variable or a NewType: the one with this id, if it is here."""
    made = kind(*arguments, **options)
    for name, value in attributes.items():
        with contextlib.suppress(AttributeError):
            setattr(made, name, value)
    return _inside._lookup_class_or_track(identity, made)


_MOST_SENTINELS = 10_000
_sentinels: dict[str, object] = {}
_ids_of_sentinels: dict[int, str] = {}
_sentinels_lock = threading.Lock()


def _reduce_sentinel(value: object) -> Any:
    with _sentinels_lock:
        identity = _ids_of_sentinels.get(id(value))
        if identity is None:
            if len(_sentinels) >= _MOST_SENTINELS:  # a program that makes them by the thousand compares none of these
                return None
            identity = uuid.uuid4().hex
            _sentinels[identity] = value
            _ids_of_sentinels[id(value)] = identity
    return sentinel, (identity,)


def sentinel(identity: str) -> object:
    """The `object()` with this id: the same one each time."""
    with _sentinels_lock:
        value = _sentinels.get(identity)
        if value is None:
            value = object()
            if len(_sentinels) < _MOST_SENTINELS:
                _sentinels[identity] = value
                _ids_of_sentinels[id(value)] = identity
    return value


def _reduce_weak_dictionary(value: Any) -> Any:
    return type(value), (dict(value),)


REDUCERS: dict[Any, Callable[[Any], Any]] = {
    CACHED: _reduce_cached,
    functools.cached_property: _reduce_cached_property,
    types.CellType: _reduce_cell,
    typing.TypeVar: _reduce_type_variable,
    typing.ParamSpec: _reduce_type_variable,
    typing.TypeVarTuple: _reduce_type_variable,
    typing.NewType: _reduce_new_type,
    weakref.WeakKeyDictionary: _reduce_weak_dictionary,
    weakref.WeakValueDictionary: _reduce_weak_dictionary,
    object: _reduce_sentinel,
}
